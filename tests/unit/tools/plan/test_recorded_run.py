"""A recorded run of `bench strategies` (three arms on two GPUs, three rates below saturation, real frontend and
workers, AIPerf, `time_scale` 8) beside an event simulation of the same step times that shares no code with the product.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.support.queueing_model import Gpu, Job, simulate_agg, simulate_pair

_DIRECTORY = Path(__file__).parent / "recorded"
RECORDED = json.loads((_DIRECTORY / "chat-straight-lines.json").read_text())
#: The same with links of a tenth of the bandwidth.
SLOW_LINK = {point["arm"]: point for point in json.loads((_DIRECTORY / "chat-slow-link.json").read_text())}
#: As `modelled.measured` and the link of the recorded run.
GPU = Gpu(
    step=8e-3, prompt_token=60e-6, answer_token=250e-6, bytes_per_token=131072, link_bytes=5e9, latency=100e-6
)
MOST_STEP_TOKENS = 8192


def two_by_turns(gpu: Gpu, jobs: list[Job], most_step_tokens: int) -> None:
    """The router gives each worker every other request, as far as equal loads go."""
    simulate_agg(gpu, jobs[0::2], most_step_tokens)
    simulate_agg(gpu, jobs[1::2], most_step_tokens)


SIMULATE: dict[str, Callable[[Gpu, list[Job], int], None]] = {
    "2 agg": two_by_turns,
    "1P1D prefill_first": simulate_pair,
    "1P1D decode_first": simulate_pair,
}


@pytest.mark.parametrize("point", RECORDED, ids=lambda point: f"{point['arm']} {point['rate']:g}")
def test_recorded_run_matches_the_simulation_within_10_percent(point: dict[str, Any]) -> None:
    rows = sorted(point["requests"])
    jobs = [Job(arrival, prompt, answer) for arrival, prompt, answer, *_ in rows]
    SIMULATE[point["arm"]](GPU, jobs, MOST_STEP_TOKENS)
    _, _, answers, in_engines, _, tpot = zip(*rows, strict=True)
    # Without what the machine added on the way to the client, which `software` tells.
    assert mean(in_engines) == pytest.approx(mean(job.ttft for job in jobs) * 1000, rel=0.1)
    assert mean(tpot) == pytest.approx(mean(job.tpot for job in jobs) * 1000, rel=0.1)
    seconds = max(job.tokens[-1] for job in jobs)
    assert sum(answers) / point["duration_s"] == pytest.approx(sum(answers) / seconds, rel=0.1)


@pytest.mark.parametrize("point", RECORDED, ids=lambda point: f"{point['arm']} {point['rate']:g}")
def test_software_share_of_ttft_is_the_clients_time_beyond_the_engines(point: dict[str, Any]) -> None:
    _, _, _, in_engines, ttft, _ = zip(*point["requests"], strict=True)
    beyond = 1 - sum(in_engines) / sum(ttft)
    # And how late steps were.
    assert beyond - 0.001 <= point["software"]["ttft"] <= beyond + 0.1


def test_slower_link_changes_the_pair_as_simulated_and_agg_not() -> None:
    before = {point["arm"]: point for point in RECORDED if point["rate"] == SLOW_LINK["2 agg"]["rate"]}
    moved = {arm: _tpot(slow) - _tpot(before[arm]) for arm, slow in SLOW_LINK.items()}
    expected = _simulated_tpot(replace(GPU, link_bytes=GPU.link_bytes / 10)) - _simulated_tpot(GPU)
    # A small difference of two runs: 0.3 of 11.6 ms.
    assert moved["1P1D prefill_first"] == pytest.approx(expected, rel=0.2)
    assert abs(moved["2 agg"]) < 0.1 * expected


def _tpot(point: dict[str, Any]) -> float:
    return float(mean(row[-1] for row in point["requests"]))


def _simulated_tpot(gpu: Gpu) -> float:
    jobs = [
        Job(arrival, prompt, answer)
        for arrival, prompt, answer, *_ in SLOW_LINK["1P1D prefill_first"]["requests"]
    ]
    simulate_pair(gpu, jobs, MOST_STEP_TOKENS)
    return mean(job.tpot for job in jobs) * 1000
