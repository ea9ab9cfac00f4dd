"""Rates that a run adds to its plan, where those of the plan do not show what an arm is able to do.

A plan's rates come from a simulation. Where an arm does better than that, or worse, all that could be concluded is
which rates are missing: the run goes on with these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from trtllm_disagg.bench.strategies.doubt import WantedRate
from trtllm_disagg.bench.strategies.planning import Engines, PointPlan, slo_of
from trtllm_disagg.bench.strategies.records import Arm, Plan, Point, PointResult, Sensitivity
from trtllm_disagg.bench.strategies.simulation import ArmSimulations
from trtllm_disagg.bench.strategies.sweep import Sweep, shown, sweeps_of
from trtllm_disagg.bench.strategies.verdict import Measure, goodput, judge
from trtllm_disagg.bench.strategies.workloads import Traffic

#: Of the plan's highest and lowest rate: beyond it the simulation is wrong, not the rates.
_HIGHEST, _LOWEST = 2.5, 0.2


def further_points(
    args: argparse.Namespace,
    engines: Engines,
    traffics: Mapping[str, Traffic],
    plan: Plan,
    results: Iterable[PointResult],
) -> tuple[Point, ...]:
    """What to measure beside the points of the plan, all of which are measured, so that the best goodput is decided.
    None where the rates are the user's own.
    """
    if args.rates or not plan.is_modelled:
        return ()
    measure, nominal = goodput(slo_of(args)), engines.workers()
    found: list[Point] = []
    for sweep in sweeps_of(plan, results):
        traffic = traffics[sweep.workload.name]
        for side, rate in _wanted(plan, sweep, measure):
            workers = {role: replace(worker, factors=side) for role, worker in nominal.items()}
            simulations = ArmSimulations(sweep.arms, traffic, workers, args.fewest_requests, args.fills_gpus)
            point_plan = PointPlan.of({arm.name: (rate,) for arm in sweep.arms}, simulations)
            found += map(point_plan.point, _points(plan, sweep, measure, side, rate))
    return tuple(found)


def _wanted(plan: Plan, sweep: Sweep, measure: Measure) -> list[tuple[Sensitivity, float]]:
    verdict = judge(sweep, measure)
    wanted = [lead.doubt.wanted for lead in verdict.doubtful if not verdict.refusal]
    rates = [(each.sensitivity, _measured_beyond(sweep, each) or each.requests_s) for each in wanted if each]
    return [(side, rate) for side, rate in dict.fromkeys(rates) if _is_near(plan, sweep, side, rate)]


def _measured_beyond(sweep: Sweep, wanted: WantedRate) -> float | None:
    """The next rate that another arm was measured at: arms are compared at rates that they share."""
    measured = {point.rate for point in sweep.measured if point.sensitivity == wanted.sensitivity}
    return min((rate for rate in measured if wanted.requests_s >= rate > wanted.beyond), default=None)


def _is_near(plan: Plan, sweep: Sweep, side: Sensitivity, rate: float) -> bool:
    planned = [each for arm in sweep.arms for each in _rates(plan.points, sweep, arm, side)]
    return _LOWEST * min(planned) <= rate <= _HIGHEST * max(planned)


def _points(plan: Plan, sweep: Sweep, measure: Measure, side: Sensitivity, rate: float) -> Iterator[Point]:
    """Of every arm that lacks it and that no lower rate has exhausted; with as many repetitions as at other rates."""
    for arm in sweep.arms:
        curves = sweep.curves(arm.name, side).values()
        highest = [curve[max(curve)] for curve in curves if max(curve) < rate]
        own = _rates(plan.every_point, sweep, arm, side)
        if rate not in own and not any(map(measure.is_exhausted, highest)):
            yield from (replace(point, rate=rate) for point in own[min(own)])


def _rates(points: Iterable[Point], sweep: Sweep, arm: Arm, side: Sensitivity) -> dict[float, list[Point]]:
    """The repetitions at each."""
    found: dict[float, list[Point]] = {}
    for point in points:
        if (point.arm, point.workload, point.sensitivity) == (arm.name, sweep.workload.name, side):
            found.setdefault(point.rate, []).append(point)
    return found


def told(points: Sequence[Point]) -> str:
    """ "2 more points, at 14.5 requests/s with decode steps x1.5"."""
    rates = dict.fromkeys(f"{point.rate:g} requests/s with {shown(point.sensitivity)}" for point in points)
    return f"the rates so far decide nothing: {len(points)} more points, at {', '.join(rates)}"
