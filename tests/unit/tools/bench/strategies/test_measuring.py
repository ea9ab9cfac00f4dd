"""Points from what the client saw: each for itself, on the modelled clock."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.client import IncompleteRead
from itertools import count
from pathlib import Path

import pytest

from trtllm_disagg.tools.bench.strategies.aiperf import AIPerf, LoadFailedError, Seen
from trtllm_disagg.tools.bench.strategies.measuring import FactorSwitch, LoadRun, Schedule, Target, measure
from trtllm_disagg.tools.bench.strategies.records import NOMINAL, Arm, Point, Sensitivity
from trtllm_disagg.tools.bench.strategies.spent import Lateness
from trtllm_disagg.tools.bench.strategies.workloads import Ask

SCALE = 4.0
LOW, HIGH = (Point("2 agg", "chat", rate, time_scale=SCALE, drain_s=1.0) for rate in (1.0, 2.0))
ASKS = tuple(Ask(arrival, (300,) * 80, 10, str(arrival)) for arrival in (0.0, 1.0, 2.0))
IN_FORCE = [(0, NOMINAL)]
ARMS = {"2 agg": Arm("2 agg", "agg", agg_workers=2)}
SCHEDULE = Schedule.of([(LOW, ASKS), (HIGH, ASKS)])


def seen(name: str, begin: float, seconds: float) -> Seen:
    """Wall seconds."""
    begin_ns = round(begin * 1e9)
    milliseconds = seconds * 1000
    gap = milliseconds * 0.9 / 9
    return Seen(
        *(
            name,
            f"id {name}",
            begin_ns,
            begin_ns + round(seconds * 1e9),
            milliseconds,
            milliseconds * 0.1,
            gap,
        ),
        *((gap,) * 9, 80, 10, 20, None),
    )


def all_seen(seconds: float) -> dict[str, Seen]:
    return {send.name: seen(send.name, 100 + send.at, seconds) for send in SCHEDULE.sends()}


def results_of(answers: dict[str, Seen]) -> dict[Point, object]:
    measured = LoadRun(SCHEDULE, answers, None, (), "load", IN_FORCE)
    results = measured.results(Target("http://there", "m"), ARMS, {}, "")
    return {result.point: result for result in results}


def test_arrivals_are_stretched_by_the_time_scale_and_points_are_apart() -> None:
    low, high = SCHEDULE.stretches
    assert [low.end - low.begin, high.end - high.begin] == pytest.approx([2 * SCALE] * 2)
    assert high.begin - low.end > 1.0 * SCALE
    sent = {send.name: send.at for send in SCHEDULE.sends()}
    assert sent["0-1"] - sent["0-0"] == SCALE
    assert min(sent, key=lambda name: sent[name]) == "warm-0"


def test_times_are_divided_by_the_time_scale() -> None:
    measured = LoadRun(SCHEDULE, all_seen(2.0), None, (), "load", IN_FORCE)
    first, second = measured.results(Target("http://there", "m"), ARMS, {"a": "1"}, "two cores")
    assert (first.point, second.point) == (LOW, HIGH)
    request = first.requests[1]
    assert (request.arrival_s, request.latency_ms, request.ttft_ms) == (1.0, 500.0, 50.0)
    assert (request.tpot_ms, sum(request.gaps_ms)) == (50.0, 450.0)
    assert first.duration_s == pytest.approx(2.5)
    assert first.kv_hit_rate == 0.25
    assert (first.commands, first.versions) == ({"url": "http://there", "load": "load"}, {"a": "1"})


def test_a_load_generator_that_needs_twice_the_time_sent_half_the_rate() -> None:
    high = SCHEDULE.stretches[1]
    answers = all_seen(2.0)
    for place, ask in enumerate(ASKS):
        late = 2 * ask.arrival * SCALE
        answers[f"1-{place}"] = seen(f"1-{place}", 100 + high.begin + late, 2.0)
    measured = LoadRun(SCHEDULE, answers, None, (), "load", IN_FORCE)
    kept, slow = measured.results(Target("http://there", "m"), ARMS, {}, "")
    assert (kept.sent_share, slow.sent_share) == (1, 0.5)


def test_a_point_that_began_while_another_ran_is_measured_again() -> None:
    assert set(results_of(all_seen(2.0))) == {LOW, HIGH}
    answers = all_seen(2.0)
    answers["0-2"] = seen("0-2", 108 + SCHEDULE.stretches[0].begin, 600.0)
    assert set(results_of(answers)) == {LOW}


def test_a_point_under_other_step_times_than_its_own_is_measured_again() -> None:
    answers = all_seen(2.0)
    second = min(seen.begin_ns for name, seen in answers.items() if name.startswith("1-"))
    slower = Sensitivity(1.5, 1.0)
    for moments, kept in (
        ([(0, NOMINAL), (second - 1, slower)], {LOW}),
        ([(0, NOMINAL), (second + 1, slower)], {LOW}),
        ([(0, slower), (second - 1, NOMINAL)], {HIGH}),
    ):
        measured = LoadRun(SCHEDULE, answers, None, (), "load", moments)
        results = measured.results(Target("http://there", "m"), ARMS, {}, "")
        assert {result.point for result in results} == kept


async def test_step_times_are_set_before_the_first_request_and_a_second_before_others() -> None:
    other = Sensitivity(1.0, 0.5)
    said: list[Sensitivity] = []
    switching = FactorSwitch([(0.0, NOMINAL), (0.5, NOMINAL), (1.0, other), (1.1, NOMINAL)], said.append)
    switching.begin()
    assert said == [NOMINAL]
    await switching.follow(lambda: asyncio.sleep(0))
    assert said == [NOMINAL, other, NOMINAL]
    assert [sensitivity for _, sensitivity in switching.done] == said


def test_pause_between_points_grows_with_drain_and_patience() -> None:
    def pause(drain: float, patience: float = 1.0) -> float:
        first, second = Schedule.of([(replace(LOW, drain_s=drain), ASKS), (HIGH, ASKS)], patience).stretches
        return second.begin - first.end

    assert pause(2.0) == pause(0.0) + 1.25 * 2.0 * SCALE
    assert pause(1.0, 2.0) == 2 * pause(1.0)


def test_a_request_that_was_not_sent_is_an_error_of_its_own() -> None:
    answers = all_seen(2.0)
    del answers["1-1"]
    measured = LoadRun(SCHEDULE, answers, None, (), "load", IN_FORCE)
    _, high = measured.results(Target("http://there", "m"), ARMS, {}, "")
    assert [request.error for request in high.requests] == [None, "not sent", None]
    assert high.is_saturated


def test_an_answer_with_fewer_tokens_than_were_asked_for_is_an_error() -> None:
    answers = all_seen(2.0)
    answers["1-1"] = replace(answers["1-1"], output_tokens=9)
    measured = LoadRun(SCHEDULE, answers, None, (), "load", IN_FORCE)
    low, high = measured.results(Target("http://there", "m"), ARMS, {}, "")
    assert not any(request.error for request in low.requests)
    short = "an answer of 9 tokens instead of 10"
    assert [request.error for request in high.requests] == [None, short, None]


def test_the_latest_worker_counts_and_only_in_the_time_of_the_point() -> None:
    looks = [
        (round(at * 1e9), {"agg-0": Lateness(steps, late), "agg-1": Lateness(steps, 0.0)})
        for at, steps, late in ((90, 100, 50.0), (160, 200, 51.0), (300, 300, 99.0))
    ]
    measured = LoadRun(SCHEDULE, {}, None, looks, "load", IN_FORCE)
    assert measured.late_ms(100 * 10**9, 150 * 10**9) == pytest.approx(10.0)


def test_target_at_a_url_has_no_logs_and_no_lateness(tmp_path: Path) -> None:
    target = Target("http://there", "m")
    assert target.logs() is None
    assert target.lateness() == {}


@dataclass(frozen=True)
class Faltering(Target):
    """The second look of this target fails. The fourth one lets the load generator end."""

    failure: Exception = field(default_factory=OSError)
    may_end: Path = Path()
    looks: Iterator[int] = field(default_factory=count)

    def lateness(self) -> dict[str, Lateness]:
        number = next(self.looks)
        if number == 1:
            raise self.failure
        if number == 3:
            self.may_end.write_text("now\n")
        return {"agg-0": Lateness(float(number))}


@pytest.mark.parametrize("failure", [ConnectionRefusedError(), IncompleteRead(b""), ValueError("cut")])
async def test_failed_metrics_poll_ends_neither_later_polls_nor_the_run(
    failure: Exception, tmp_path: Path
) -> None:
    may_end, load = tmp_path / "may_end", tmp_path / "load"
    os.mkfifo(may_end)
    load.write_text(f'#!/bin/bash\nread -r _ < {may_end}\n: > "${{@: -1}}/profile_export.jsonl"\n')
    load.chmod(0o700)
    target = Faltering("http://there", "m", failure=failure, may_end=may_end)
    schedule = Schedule.of([(LOW, ASKS), (replace(HIGH, sensitivity=Sensitivity(1.5, 1.0)), ASKS)])
    measured = await measure(schedule, target, AIPerf(load), tmp_path / "out")
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [sensitivity for _, sensitivity in measured.factors] == [NOMINAL]
    assert measured.late[-1][1]["agg-0"].steps >= 4


async def test_a_load_generator_that_fails_leaves_no_task_behind(tmp_path: Path) -> None:
    with pytest.raises(LoadFailedError, match="exit code 1"):
        await measure(SCHEDULE, Target("http://there", "m"), AIPerf(Path("/bin/false")), tmp_path / "out")
    assert asyncio.all_tasks() == {asyncio.current_task()}
