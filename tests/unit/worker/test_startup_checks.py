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


def checks(*others: dict[str, Any]) -> StartupChecks:
    """Of a decode worker that is seen with these."""

    async def look() -> list[DescribedInstance]:
        return [
            DescribedInstance(PLACE, 5 + i, each) for i, each in enumerate([described("decode"), *others])
        ]

    return StartupChecks(CONFIG, ModelNameGuard(IDENTITY, 5, {PLACE}, look), LateDirectory())


async def test_a_peer_that_is_listed_with_this_worker_is_compared_though_its_watch_is_late() -> None:
    with pytest.raises(ConfigError, match="tokens_per_block"):
        await checks(described("prefill", block_size=64)).before_registering(described("decode"))


async def test_workers_of_the_own_role_are_not_compared() -> None:
    others = (described("prefill"), described("decode", block_size=64))
    await checks(*others).before_registering(described("decode"))


SWITCHED = described("prefill", strategy="decode_first") | {"strategy": "prefill_first", "was_switched": True}
#: Started after the switch, by an `up` that has heard of it.
STARTED_SO = described("prefill", strategy="prefill_first")


def starting(*peers: dict[str, Any], **settings: Any) -> tuple[StartupChecks, dict[str, Any]]:
    """A decode worker under decode_first, and its description."""
    config = replace(CONFIG, **settings)
    own = described("decode", **settings)

    async def look() -> list[DescribedInstance]:
        return [DescribedInstance(PLACE, 5 + i, each) for i, each in enumerate([own, *peers])]

    return StartupChecks(config, ModelNameGuard(IDENTITY, 5, {PLACE}, look), Directory(*peers)), own


@pytest.mark.parametrize("peers", [[SWITCHED], [STARTED_SO, SWITCHED]])
async def test_a_worker_runs_what_the_others_were_switched_to_while_it_loaded(
    peers: list[dict[str, Any]],
) -> None:
    starts, own = starting(*peers)
    assert await starts.before_listing(own)
    assert await starts.before_registering(own) == "prefill_first"


async def test_a_worker_that_loaded_while_the_others_were_switched_there_and_back_runs_what_they_run() -> (
    None
):
    switched_back = described("prefill", strategy="decode_first") | {"was_switched": True}
    starts, own = starting(switched_back, strategy="prefill_first")
    assert await starts.before_listing(own)
    assert await starts.before_registering(own) == "decode_first"


async def test_worker_that_starts_during_a_switch_keeps_its_strategy_until_commanded() -> None:
    starts, own = starting(SWITCHED, described("prefill"))
    assert await starts.before_listing(own)
    assert await starts.before_registering(own) == "decode_first"


async def test_another_strategy_without_a_switch_is_refused() -> None:
    starts, own = starting(STARTED_SO)
    with pytest.raises(ConfigError, match="--disaggregation-strategy"):
        await starts.before_listing(own)


async def test_worker_with_next_endpoint_is_refused_after_a_switch() -> None:
    starts, own = starting(SWITCHED, next_endpoint="dyn://dynamo.elsewhere.generate")
    with pytest.raises(ConfigError, match="--disaggregation-strategy"):
        await starts.before_listing(own)


async def test_block_size_mismatch_is_refused_after_a_switch_too() -> None:
    starts, own = starting(SWITCHED | {"block_size": 64})
    with pytest.raises(ConfigError, match="tokens_per_block"):
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
