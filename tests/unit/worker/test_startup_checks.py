"""The checks of a start, where two workers that do not fit together start at the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.worker.test_pairing import described
from trtllm_disagg.admin.commands import DescribedInstance
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.worker.pairing import ModelIdentity
from trtllm_disagg.worker.startup_checks import ModelNameGuard, StartupChecks

PLACE = "dyn://dynamo.backend.generate"
CONFIG = WorkerConfig(model="org/model", engine="embedded", role=Role.DECODE)
IDENTITY = ModelIdentity("org/model", "org/model", "ab", role="decode")


class LateDirectory:
    """The watch at the other role's endpoint that has not heard of the newest worker yet."""

    async def wait_for_second_stage(self, endpoint_id: str) -> bool:
        raise AssertionError(f"a second stage at {endpoint_id}")

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]:
        return []


class Directory(LateDirectory):
    """Workers of the other role."""

    def __init__(self, *peers: dict[str, Any]) -> None:
        self._peers = list(peers)

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]:
        return self._peers


class DeadFirst(LateDirectory):
    """Discovery lists a dead instance, whose description never comes, and later a live one."""

    def __init__(self, live: dict[str, Any], *, is_stopped: bool = False) -> None:
        self._answers = [[], [], [live]]
        self._is_stopped = is_stopped

    async def wait_for_second_stage(self, endpoint_id: str) -> bool:
        return not self._is_stopped

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]:
        return self._answers.pop(0)


def starting(
    *others: dict[str, Any], late: bool = False, **settings: Any
) -> tuple[StartupChecks, dict[str, Any]]:
    """A decode worker under decode_first that is seen with these, and its description."""
    own = described("decode", **settings)

    async def look() -> list[DescribedInstance]:
        return [DescribedInstance(PLACE, 5 + i, each) for i, each in enumerate([own, *others])]

    directory = LateDirectory() if late else Directory(*others)
    checks = StartupChecks(replace(CONFIG, **settings), ModelNameGuard(IDENTITY, 5, {PLACE}, look), directory)
    return checks, own


async def test_a_peer_that_is_listed_with_this_worker_is_compared_though_its_watch_is_late() -> None:
    starts, own = starting(described("prefill", block_size=64), late=True)
    with pytest.raises(ConfigError, match="tokens_per_block"):
        await starts.before_registering(own)


async def test_workers_of_the_own_role_are_not_compared() -> None:
    others = (described("prefill"), described("decode", block_size=64))
    starts, own = starting(*others, late=True)
    await starts.before_registering(own)


SWITCHED = described("prefill", strategy="decode_first") | {"strategy": "prefill_first", "was_switched": True}
SWITCHED_BACK = described("prefill", strategy="decode_first") | {"was_switched": True}
#: Started after the switch, by an `up` that has heard of it.
STARTED_SO = described("prefill", strategy="prefill_first")


@pytest.mark.parametrize(
    ("peers", "own_strategy", "runs"),
    [
        pytest.param([SWITCHED], "decode_first", "prefill_first", id="switched"),
        pytest.param([STARTED_SO, SWITCHED], "decode_first", "prefill_first", id="one switched"),
        pytest.param([SWITCHED_BACK], "prefill_first", "decode_first", id="there and back"),
        # Until it is commanded.
        pytest.param([SWITCHED, described("prefill")], "decode_first", "decode_first", id="during a switch"),
    ],
)
async def test_a_worker_runs_what_the_others_were_switched_to_while_it_loaded(
    peers: list[dict[str, Any]], own_strategy: str, runs: str
) -> None:
    starts, own = starting(*peers, strategy=own_strategy)
    assert await starts.before_listing(own)
    assert await starts.before_registering(own) == runs


ELSEWHERE = {"next_endpoint": "dyn://dynamo.elsewhere.generate"}


@pytest.mark.parametrize(
    ("peer", "settings", "named"),
    [
        pytest.param(STARTED_SO, {}, "--disaggregation-strategy", id="not switched"),
        pytest.param(SWITCHED, ELSEWHERE, "--disaggregation-strategy", id="an endpoint of its own"),
        pytest.param(SWITCHED | {"block_size": 64}, {}, "tokens_per_block", id="another block size"),
    ],
)
async def test_a_difference_that_a_switch_does_not_explain_is_refused(
    peer: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    starts, own = starting(peer, **settings)
    with pytest.raises(ConfigError, match=named):
        await starts.before_listing(own)


def waiting_for(directory: DeadFirst) -> StartupChecks:
    """A first stage that serves with a second one only."""

    async def look() -> list[DescribedInstance]:
        return []

    config = replace(CONFIG, strategy="decode_first", on_missing_stage="fail")
    return StartupChecks(config, ModelNameGuard(IDENTITY, 5, {PLACE}, look), directory)


async def test_first_stage_waits_for_a_second_one_that_answers() -> None:
    assert await waiting_for(DeadFirst(described("prefill"))).before_listing(described("decode"))
    with pytest.raises(ConfigError, match="tokens_per_block"):
        await waiting_for(DeadFirst(described("prefill", block_size=64))).before_listing(described("decode"))


async def test_first_stage_that_is_stopped_while_it_waits_is_not_listed() -> None:
    stopped = DeadFirst(described("prefill"), is_stopped=True)
    assert not await waiting_for(stopped).before_listing(described("decode"))
