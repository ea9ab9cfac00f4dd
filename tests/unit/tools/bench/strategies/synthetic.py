"""Runs with a right verdict that is known by construction: an arm keeps the SLO for so many requests a second."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtllm_disagg.tools.bench.strategies.records import (
    NOMINAL,
    Arm,
    Parts,
    Plan,
    Point,
    PointResult,
    RequestRecord,
    RunDirectory,
    Sensitivity,
    Workload,
)
from trtllm_disagg.tools.bench.strategies.sweep import Sweep, sweeps_of

BAND = (NOMINAL, Sensitivity(0.5), Sensitivity(1.5), Sensitivity(1, 0.5), Sensitivity(1, 1.5))
RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
REQUESTS = 100
OUTPUT_TOKENS = 100
IN_TIME_MS, LATE_MS = 100.0, 5000.0
CLEAN = {"ttft": 0.01, "tpot": 0.01, "latency": 0.01}
CHAT = Workload("chat", "short questions and answers", 256, 256)


@dataclass(frozen=True)
class Behaviour:
    """Of an arm."""

    #: Requests a second that it keeps the SLO for.
    capacity: float
    #: Of its work: what of it is prefill, so that the band moves it.
    prefill_share: float = 0.5
    #: The share by which repetitions differ from the first one.
    noise: float = 0.0
    tpot: float = 20.0
    gpus: int = 2
    strategy: str = "agg"

    def capacity_at(self, point: Point) -> float:
        factors = point.sensitivity
        work = self.prefill_share * factors.prefill_factor + (1 - self.prefill_share) * factors.decode_factor
        return self.capacity / work * (1 - self.noise) ** point.repetition


def arms_of(behaviours: dict[str, Behaviour]) -> tuple[Arm, ...]:
    return tuple(
        Arm(name, b.strategy, agg_workers=b.gpus, gpus=b.gpus)
        if b.strategy == "agg"
        else Arm(name, b.strategy, prefill_workers=1, decode_workers=b.gpus - 1, gpus=b.gpus)
        for name, b in behaviours.items()
    )


def plan_of(
    behaviours: dict[str, Behaviour],
    *,
    rates: Sequence[float] = RATES,
    repetitions: int = 3,
    band: Sequence[Sensitivity] = BAND,
) -> Plan:
    points = tuple(
        Point(arm, CHAT.name, rate, repetition, variant)
        for variant in band
        for repetition in range(repetitions if variant == NOMINAL else 1)
        for rate in rates
        for arm in behaviours
    )
    return Plan(
        "a model on made-up GPUs", arms_of(behaviours), (CHAT,), points, command="trtllm-disagg bench"
    )


@functools.cache
def result_of(point: Point, behaviour: Behaviour) -> PointResult:
    """The requests that are beyond the arm's capacity come late; the rest is in time."""
    in_time = min(1.0, behaviour.capacity_at(point) / point.rate)
    dice = random.Random(f"{point.rate} {point.repetition}")
    requests = tuple(
        _request(i / point.rate, behaviour, i < round(in_time * REQUESTS), dice) for i in range(REQUESTS)
    )
    ends = [request.arrival_s + request.latency_ms / 1000 for request in requests]
    return PointResult(
        point,
        requests,
        duration_s=max(ends),
        software=CLEAN,
        kv_hit_rate=0.25,
        is_saturated=in_time < 0.9,
        commands={"frontend": f"frontend of {point.arm}", "load": f"aiperf --rate {point.rate:g}"},
        versions={"trtllm-disagg": "0.2.0"},
        machine="two cores",
    )


def _request(arrival: float, behaviour: Behaviour, is_in_time: bool, dice: random.Random) -> RequestRecord:
    ttft = (IN_TIME_MS if is_in_time else LATE_MS) * dice.uniform(0.9, 1.0)
    gaps = (behaviour.tpot,) * (OUTPUT_TOKENS - 1)
    parts = Parts(queue=0.6 * ttft, prefill=0.4 * ttft, transfer=1.0, decode=sum(gaps))
    return RequestRecord(
        arrival,
        input_tokens=dice.randrange(100, 400),
        output_tokens=OUTPUT_TOKENS,
        latency_ms=ttft + sum(gaps),
        ttft_ms=ttft,
        tpot_ms=behaviour.tpot,
        gaps_ms=gaps,
        parts=parts,
    )


def results_of(plan: Plan, behaviours: dict[str, Behaviour]) -> list[PointResult]:
    return [result_of(point, behaviours[point.arm]) for point in plan.points]


def sweep_of(
    behaviours: dict[str, Behaviour],
    *,
    rates: Sequence[float] = RATES,
    repetitions: int = 3,
    band: Sequence[Sensitivity] = BAND,
) -> Sweep:
    plan = plan_of(behaviours, rates=rates, repetitions=repetitions, band=band)
    (sweep,) = sweeps_of(plan, results_of(plan, behaviours))
    return sweep


def sweep_of_results(plan: Plan, results: Iterable[PointResult]) -> Sweep:
    (sweep,) = sweeps_of(plan, results)
    return sweep


def saved(path: Path, behaviours: dict[str, Behaviour]) -> RunDirectory:
    run, plan = RunDirectory(path), plan_of(behaviours)
    run.save_plan(plan)
    for result in results_of(plan, behaviours):
        run.save(result)
    return run


def with_software(result: PointResult, share: float) -> PointResult:
    return replace(result, software=dict.fromkeys(CLEAN, share))


def with_error(result: PointResult) -> PointResult:
    first, *others = result.requests
    return replace(result, requests=(replace(first, error="503"), *others))
