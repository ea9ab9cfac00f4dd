"""What a machine must allow before a deployment starts; the machine is a snapshot."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_disagg.processes.dev_shm import MIB
from trtllm_disagg.processes.limits import (
    LimitError,
    MachineLimits,
    Needs,
    needs_of_worker,
    require,
)
from trtllm_disagg.tools.up.lifecycle import needs_of
from trtllm_disagg.tools.up.plan import DeploymentConfig

USUAL = MachineLimits(
    max_inotify_instances=128, free_inotify_instances=128, max_open_files=524288, ptrace_scope=0
)
PAIR = needs_of(DeploymentConfig("prefill_first", "toy", "toy", Path("run")))


def test_machine_with_usual_limits_has_no_shortage() -> None:
    assert require(PAIR, USUAL) == []


def test_machine_with_unknown_limits_is_not_refused() -> None:
    assert require(PAIR, MachineLimits()) == []


def test_missing_inotify_instances_are_named_with_the_command_that_helps() -> None:
    few = replace(USUAL, free_inotify_instances=PAIR.inotify_instances - 1)

    with pytest.raises(LimitError) as raised:
        require(PAIR, few)

    assert str(raised.value) == (
        f"fs.inotify.max_user_instances is 128, of which this user's processes leave {PAIR.inotify_instances - 1}; "
        f"{PAIR.inotify_instances} are needed. Stop another deployment, or: "
        "sudo sysctl fs.inotify.max_user_instances=1024"
    )
    assert require(PAIR, replace(few, free_inotify_instances=PAIR.inotify_instances)) == []


def test_too_few_open_files_are_refused_and_few_are_a_warning() -> None:
    with pytest.raises(LimitError, match=r"ulimit -Hn\) is 64; each process needs 128"):
        require(PAIR, replace(USUAL, max_open_files=64))

    (warning,) = require(PAIR, replace(USUAL, max_open_files=256))
    assert warning == "the hard limit of open files (ulimit -Hn) is 256: enough for some 128 connections"


def test_all_shortages_are_in_one_error() -> None:
    with pytest.raises(LimitError, match=r"max_user_instances .*; the hard limit of open files"):
        require(PAIR, replace(USUAL, free_inotify_instances=0, max_open_files=64))


@pytest.mark.parametrize(("is_root", "warnings"), [(False, 1), (True, 0)])
def test_a_ptrace_scope_that_forbids_reading_is_a_warning(is_root: bool, warnings: int) -> None:
    assert len(require(PAIR, replace(USUAL, ptrace_scope=1, is_root=is_root))) == warnings


def test_no_room_in_dev_shm_is_a_warning_with_the_command_that_helps() -> None:
    (warning,) = require(PAIR, replace(USUAL, free_shared_memory=20 * MIB))
    assert warning == (
        "/dev/shm has 20 MiB free, and NIXL between 2 workers needs 21 MiB; some or all would move KV through shared "
        "memory without a name, or be refused where NIXL is set: remove what is left in /dev/shm, or start the "
        "container with --shm-size=256m, or: sudo mount -o remount,size=256m /dev/shm"
    )
    assert require(PAIR, replace(USUAL, free_shared_memory=22 * MIB)) == []


def test_workers_that_move_no_kv_need_no_room_in_dev_shm() -> None:
    alone = needs_of(DeploymentConfig("agg", "toy", "toy", Path("run")))
    assert require(alone, replace(USUAL, free_shared_memory=0)) == []


def test_little_locked_memory_beside_rdma_is_a_warning() -> None:
    little = replace(USUAL, max_locked_memory=64 * 1024)
    (warning,) = require(PAIR, little)
    assert warning.startswith(
        "the hard limit of locked memory (ulimit -Hl) is 64 KiB, and KV that moves by RDMA"
    )
    assert require(Needs(), little) == []


def test_deployments_side_by_side_need_the_sum_of_instances() -> None:
    assert (PAIR + PAIR).inotify_instances == 2 * PAIR.inotify_instances
    assert (PAIR + PAIR).open_files == PAIR.open_files
    assert (PAIR + PAIR).peers == 4


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

    limits = MachineLimits.read(Needs(inotify_instances=2))

    assert limits.free_inotify_instances in (0, 1, 2)
    assert len(os.listdir("/proc/self/fd")) == before
