"""The ratio of roles, on a deployment that is a formula: more requests than its workers can do make it late."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_disagg.tools.admin.ratio import Goal, Ratio
from trtllm_disagg.tools.top.snapshot import (
    FrontendLoad,
    Histogram,
    Process,
    Snapshot,
    WorkerLoad,
    share_within,
)

GOAL = Goal(ttft=0.5, itl=0.03, max_workers=8)
#: Requests a second that one worker of a role can do within the limits.
CAN_DO = {"prefill": 4.0, "decode": 2.0, "agg": 1.0}
NONE = Histogram(tuple((bound, 0.0) for bound in (0.01, 0.02, 0.03, 0.04, 0.1, 0.25, 0.5, 1.0, math.inf)))


def with_one(counted: Histogram, seconds: float) -> Histogram:
    buckets = tuple((bound, count + (seconds <= bound)) for bound, count in counted.buckets)
    return Histogram(buckets, counted.total + seconds)


@dataclass
class Deployment:
    workers: dict[str, int]
    rate: float = 0.0
    looks: int = 0
    ttft: Histogram = NONE
    itl: Histogram = NONE

    def use(self, role: str) -> float:
        return self.rate / CAN_DO[role] / self.workers[role] if role in self.workers else 0.0

    def look(self) -> Snapshot:
        self.looks += 1
        is_late = max(self.use("prefill"), self.use("agg")) > 1
        self.ttft = with_one(self.ttft, 2.0 if is_late else 0.2)
        self.itl = with_one(self.itl, 0.03 * max(self.use("decode"), self.use("agg")))
        return Snapshot(self.looks, "", "", "", "", self.processes(), self.frontend())

    def processes(self) -> tuple[Process, ...]:
        return tuple(
            Process(f"{role}-{index}", role, "ready", load=self.load(role))
            for role, count in self.workers.items()
            for index in range(count)
        )

    def load(self, role: str) -> WorkerLoad:
        """A prefill worker computes for as many of ten looks as tenths of its time are used."""
        batch = 9 if role != "prefill" else int(self.looks % 10 < 10 * self.use(role))
        return WorkerLoad(batch=batch, kv_blocks=int(500 * min(1.0, self.use(role))), kv_blocks_total=1000)

    def frontend(self) -> FrontendLoad:
        return FrontendLoad(requests=self.looks, ttft=self.ttft, itl=self.itl)


def after(looks: int, ratio: Ratio, deployment: Deployment) -> list[Mapping[str, int]]:
    """What was changed in so many looks."""
    changes: list[Mapping[str, int]] = []
    for _ in range(looks):
        if wanted := ratio.after(deployment.look()):
            changes.append(dict(wanted.workers))
            deployment.workers = dict(wanted.workers)
    return changes


@pytest.mark.parametrize(
    ("workers", "rate", "changes"),
    [
        ({"prefill": 1, "decode": 3}, 4.4, [{"prefill": 2, "decode": 3}]),
        ({"prefill": 1, "decode": 5}, 5.5, [{"prefill": 2, "decode": 4}]),
        ({"prefill": 3, "decode": 1}, 3.0, [{"prefill": 2, "decode": 2}]),
        ({"prefill": 4, "decode": 4}, 12.0, []),  # eight are the most
        ({"prefill": 2, "decode": 3}, 5.0, []),
        ({"agg": 2}, 2.5, [{"agg": 3}]),
        ({"prefill": 2, "decode": 2}, 3.5, [{"prefill": 2, "decode": 3}]),  # decode would be late soon
    ],
)
def test_a_late_role_gets_a_worker_of_the_other_or_a_new_one(
    workers: dict[str, int], rate: float, changes: list[Mapping[str, int]]
) -> None:
    assert after(30, Ratio(GOAL), Deployment(workers, rate)) == changes


def test_idle_workers_leave_until_the_least_are_there() -> None:
    changes = after(100, Ratio(GOAL), Deployment({"prefill": 2, "decode": 3}, 0.1))
    assert [sum(each.values()) for each in changes] == [4, 3, 2]
    assert changes[-1] == {"prefill": 1, "decode": 1}


def test_without_a_number_idle_workers_come_back_with_the_load_and_no_more() -> None:
    ratio, deployment = Ratio(Goal(ttft=0.5, itl=0.03)), Deployment({"prefill": 2, "decode": 3}, 0.1)
    after(100, ratio, deployment)
    assert sum(deployment.workers.values()) == 2
    deployment.rate = 5.5
    after(200, ratio, deployment)
    assert deployment.workers == {"prefill": 2, "decode": 3}


def test_numbers_of_other_workers_count_no_more() -> None:
    ratio, deployment = Ratio(GOAL), Deployment({"prefill": 1, "decode": 5}, 5.5)
    assert after(4, ratio, deployment) == []
    deployment.workers = {"prefill": 1, "decode": 4}  # one was killed: the measurement begins again
    assert after(4, ratio, deployment) == []
    assert after(1, ratio, deployment) == [{"prefill": 2, "decode": 4}]


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.floats(0.1, 20.0))
def test_a_steady_load_ends_in_a_ratio_that_stays(prefill: int, decode: int, rate: float) -> None:
    """From any ratio: in time if eight workers can be, and then without a further change."""
    ratio, deployment = Ratio(GOAL), Deployment({"prefill": prefill, "decode": decode}, rate)
    after(200, ratio, deployment)
    assert after(50, ratio, deployment) == []
    needed = {role: max(1, math.ceil(rate / CAN_DO[role])) for role in deployment.workers}
    assert sum(deployment.workers.values()) <= 8
    if sum(needed.values()) <= 7:
        assert all(deployment.workers[role] >= count for role, count in needed.items())


def test_share_within_a_limit_is_of_the_new_measurements_only() -> None:
    before = Histogram(((0.1, 4.0), (0.2, 4.0), (math.inf, 8.0)), 9.0)
    now = Histogram(((0.1, 4.0), (0.2, 6.0), (math.inf, 12.0)), 10.0)
    assert share_within(0.15, now, before) == pytest.approx(0.25)
    assert share_within(0.2, now, before) == pytest.approx(0.5)
    assert share_within(0.5, now, before) == pytest.approx(0.5), "beyond the last bound nothing is known"
    assert share_within(0.2, now, now) is None


def test_a_role_with_fewer_workers_than_least_gets_them_whatever_the_load_is() -> None:
    ratio = Ratio(Goal(ttft=0.5, itl=0.03, min_workers=2, max_workers=6), roles=("prefill", "decode"))
    decode = Process("decode-0", "decode", "ready")
    one = Snapshot(0.0, "", "m", "decode_first", frontend=FrontendLoad(), processes=(decode,), doubt="")
    wanted = [found for _ in range(8) if (found := ratio.after(one))]
    assert [each.workers for each in wanted] == [{"prefill": 2, "decode": 2}] * 2
