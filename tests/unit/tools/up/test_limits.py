"""What a machine must allow before a deployment starts; the machine is a snapshot."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_disagg.common.machine import MachineLimits, Needs, needs_of_worker, require
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.plan import DeploymentConfig
from trtllm_disagg.tools.up.workers import needs_of

USUAL = MachineLimits(max_inotify_instances=128, free_inotify_instances=128, max_open_files=524288)
PAIR = needs_of(DeploymentConfig("prefill_first", "toy", "toy", Path("run")))


@pytest.mark.parametrize(
    "limits",
    [USUAL, MachineLimits(), replace(USUAL, free_inotify_instances=PAIR.inotify_instances)],
    ids=["usual", "unknown", "just enough inotify"],
)
def test_machine_that_suffices_has_no_shortage(limits: MachineLimits) -> None:
    assert require(PAIR, limits) == []


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            {"free_inotify_instances": PAIR.inotify_instances - 1},
            f"is 128, .* {PAIR.inotify_instances} are needed.* sudo sysctl fs.inotify.max_user_instances=1024",
        ),
        ({"max_open_files": 64}, r"ulimit -Hn\) is 64; each process needs 128"),
        (
            {"free_inotify_instances": 0, "max_open_files": 64},
            "max_user_instances .*; the hard limit of open files",
        ),
    ],
)
def test_machine_on_which_no_deployment_can_start_is_refused_with_all_reasons(
    limits: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        require(PAIR, replace(USUAL, **limits))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_locked_memory": 64 * 1024}, "(ulimit -Hl) is 64 KiB, and KV that moves by RDMA"),
        ({"max_open_files": 256}, "(ulimit -Hn) is 256: enough for some 128 connections"),
    ],
)
def test_machine_on_which_something_is_slow_or_missing_is_warned_of(
    limits: dict[str, Any], words: str
) -> None:
    (warning,) = require(PAIR, replace(USUAL, **limits))
    assert words in warning


def test_deployments_side_by_side_need_the_sum_of_instances() -> None:
    both = PAIR + PAIR
    assert (both.inotify_instances, both.open_files) == (2 * PAIR.inotify_instances, PAIR.open_files)


@pytest.mark.parametrize(
    ("has_peers", "discovery", "instances"), [(True, "file", 2), (False, "file", 0), (True, "etcd", 0)]
)
def test_a_worker_alone_needs_instances_for_its_peers_in_files(
    has_peers: bool, discovery: str, instances: int
) -> None:
    needs = needs_of_worker(has_peers=has_peers, discovery_backend=discovery)
    assert needs.inotify_instances == instances


def test_reading_this_machine_opens_no_more_than_was_asked_for_and_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert MachineLimits.read(Needs(inotify_instances=2)).free_inotify_instances in (0, 1, 2)
    assert len(os.listdir("/proc/self/fd")) == before
