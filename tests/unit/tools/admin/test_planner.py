"""`autoscale --planner`: the newest decision counts, within the bounds of the operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.handling import until
from trtllm_disagg.common import cli
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.admin import autoscale_command, controller
from trtllm_disagg.tools.admin.autoscale_command import Numbers, _follow_planner, _within
from trtllm_disagg.tools.admin.controller import Decision
from trtllm_disagg.tools.admin.ratio import Goal
from trtllm_disagg.tools.top import observers

GOAL = Goal(1.0, 1.0, min_workers=1, max_workers=4)


class FakePlanner:
    def __init__(self) -> None:
        self.now = Decision(1, {"prefill": 0, "decode": 2}, None)
        self.confirmed: list[int] = []

    async def newest(self) -> Decision:
        return self.now

    async def confirm(self, decision: Decision) -> None:
        self.confirmed.append(decision.id)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> FakePlanner:
    fake = FakePlanner()

    @asynccontextmanager
    async def opened(namespace: str) -> AsyncIterator[FakePlanner]:
        yield fake

    monkeypatch.setattr(controller, "planner", opened)
    monkeypatch.setattr(autoscale_command, "_PLANNER_SECONDS", 0.01)
    return fake


async def test_a_decision_that_cannot_be_reached_does_not_keep_the_next_one_waiting(
    planner: FakePlanner,
) -> None:
    reached: list[Numbers] = []

    async def reach(wanted: Numbers) -> None:
        reached.append(wanted)
        if wanted["decode"] == 2:
            raise ConfigError("no GPU is free")
        if wanted["decode"] == 3:
            await asyncio.Event().wait()

    following = asyncio.create_task(_follow_planner("dynamo", reach, GOAL))
    await until(lambda: len(reached) == 1)
    planner.now = Decision(2, {"prefill": 1, "decode": 3}, None)
    await until(lambda: len(reached) == 2)
    planner.now = Decision(3, {"prefill": 1, "decode": 1}, None)
    await until(lambda: planner.confirmed == [3])
    following.cancel()
    assert reached == [{"prefill": 1, "decode": n} for n in (2, 3, 1)], "at least one of each role"


@pytest.mark.parametrize(
    ("wanted", "within"),
    [
        ({"prefill": 2, "decode": 2}, {"prefill": 2, "decode": 2}),
        ({"prefill": 0, "decode": 2}, {"prefill": 1, "decode": 2}),
        ({"prefill": 64, "decode": 64}, {"prefill": 2, "decode": 2}),
        ({"decode": 9}, {"decode": 4}),
    ],
)
def test_a_decision_is_kept_within_least_and_most(wanted: Numbers, within: Numbers) -> None:
    assert _within(wanted, GOAL) == within


def test_a_maximum_below_one_worker_of_each_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscale_command, "send_to_up", lambda *sent: {"strategy": "auto"})
    monkeypatch.setattr(observers, "observer_of", lambda *place: None)
    with pytest.raises(ConfigError, match=r"--max-workers: 1 .*at least 2, --min-workers 1 of each role"):
        cli.run(["autoscale", "--run-dir", ".", "--max-workers", "1"])
