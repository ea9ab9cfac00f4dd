"""Adds rates to the plan of a run if its planned rates do not show how much an arm sustains.

The planned rates come from a simulation. If an arm does better or worse than simulated, the comparison ends in a doubt
that names the missing rate, and the run goes on with that rate.
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

#: As factors of the plan's highest and lowest rate. Beyond them the simulation is wrong, not the choice of rates.
_HIGHEST, _LOWEST = 2.5, 0.2


def further_points(
    args: argparse.Namespace,
    engines: Engines,
    traffics: Mapping[str, Traffic],
    plan: Plan,
    results: Iterable[PointResult],
) -> tuple[Point, ...]:
    """The points to measure beyond the plan's, all of which are measured, to decide the best goodput. Empty if the user
    chose the rates.
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
    """The next rate at which another arm was measured: arms are compared at rates that they share."""
    measured = {point.rate for point in sweep.measured if point.sensitivity == wanted.sensitivity}
    return min((rate for rate in measured if wanted.requests_s >= rate > wanted.beyond), default=None)


def _is_near(plan: Plan, sweep: Sweep, side: Sensitivity, rate: float) -> bool:
    planned = [each for arm in sweep.arms for each in _rates(plan.points, sweep, arm, side)]
    return _LOWEST * min(planned) <= rate <= _HIGHEST * max(planned)


def _points(plan: Plan, sweep: Sweep, measure: Measure, side: Sensitivity, rate: float) -> Iterator[Point]:
    """Points at `rate` for each arm that lacks it and that no lower rate has exhausted, with all repetitions."""
    for arm in sweep.arms:
        curves = sweep.curves(arm.name, side).values()
        highest = [curve[max(curve)] for curve in curves if max(curve) < rate]
        own = _rates(plan.every_point, sweep, arm, side)
        if rate not in own and not any(map(measure.is_exhausted, highest)):
            yield from (replace(point, rate=rate) for point in own[min(own)])


def _rates(points: Iterable[Point], sweep: Sweep, arm: Arm, side: Sensitivity) -> dict[float, list[Point]]:
    """The points of each rate, one for each repetition."""
    found: dict[float, list[Point]] = {}
    for point in points:
        if (point.arm, point.workload, point.sensitivity) == (arm.name, sweep.workload.name, side):
            found.setdefault(point.rate, []).append(point)
    return found


def announcement(points: Sequence[Point]) -> str:
    """ "2 more points, at 14.5 requests/s with decode steps x1.5"."""
    rates = dict.fromkeys(f"{point.rate:g} requests/s with {shown(point.sensitivity)}" for point in points)
    return f"the rates so far decide nothing: {len(points)} more points, at {', '.join(rates)}"
