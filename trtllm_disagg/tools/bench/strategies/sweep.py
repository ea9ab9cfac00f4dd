"""All points of one workload on a number of GPUs, and which of them may support a conclusion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

from trtllm_disagg.tools.bench.figures import rounded
from trtllm_disagg.tools.bench.strategies.measures import PERCENTILES, MeasuredPoint, Slo
from trtllm_disagg.tools.bench.strategies.records import (
    NOMINAL,
    Arm,
    Plan,
    Point,
    PointResult,
    Sensitivity,
    Workload,
    gpu_count,
)

#: Largest share of a measured time that our own software may take; above it, the time does not show the GPUs.
MOST_SOFTWARE = 0.05
#: An arm with this share of its requests in time could take more.
ENOUGH_IN_TIME = 0.9

#: One repetition of one arm, by rate.
Curve = Mapping[float, MeasuredPoint]
#: By name of a time that matters: the share of our own software in it, at a point.
SoftwareShares = Callable[[MeasuredPoint], Mapping[str, float]]


class WantedRate(NamedTuple):
    """A rate at which an arm would show how much it sustains."""

    sensitivity: Sensitivity
    requests_s: float
    #: The highest, or lowest, rate that was compared.
    beyond: float


@dataclass(frozen=True, slots=True)
class Doubt:
    #: A clause, as the report says it.
    why: str
    #: What a user does next: a clause with the flag in it.
    remedy: str
    #: The two arms are equally good, within the precision of the measurement.
    is_tie: bool = False
    #: The rate that is missing; a run that chose its own rates measures it by itself (starting.py).
    wanted: WantedRate | None = None

    def __bool__(self) -> bool:
        return bool(self.why)

    def __str__(self) -> str:
        return self.why


NO_DOUBT = Doubt("", "")
GO_ON = "give the same command again, until every point is measured"


def remedies(doubts: Iterable[Doubt]) -> str:
    """The distinct remedies of `doubts`, joined by semicolons."""
    return "; ".join(dict.fromkeys(doubt.remedy for doubt in doubts if doubt.remedy))


@dataclass(frozen=True)
class Sweep:
    workload: Workload
    #: The arms with at least one measured point.
    arms: tuple[Arm, ...]
    measured: Mapping[Point, MeasuredPoint]
    is_modelled: bool = True
    #: Why some measured rates are left out.
    left_out: tuple[Doubt, ...] = ()
    #: The run's arms with another number of GPUs, which are not compared with these.
    elsewhere: tuple[Arm, ...] = ()

    @property
    def name(self) -> str:
        """ "chat on 4 GPUs"."""
        return f"{self.workload.name} on {gpu_count(self.arms[0].gpus)}"

    @cached_property
    def variants(self) -> tuple[Sensitivity, ...]:
        return tuple(dict.fromkeys(point.sensitivity for point in self.measured))

    @cached_property
    def rates(self) -> tuple[float, ...]:
        return tuple(sorted({point.rate for point in self.measured if point.sensitivity == NOMINAL}))

    @cached_property
    def _curves(self) -> dict[tuple[str, Sensitivity, int], dict[float, MeasuredPoint]]:
        curves: dict[tuple[str, Sensitivity, int], dict[float, MeasuredPoint]] = {}
        for point, measured in self.measured.items():
            key = point.arm, point.sensitivity, point.repetition
            curves.setdefault(key, {})[point.rate] = measured
        return curves

    def curves(self, arm: str, sensitivity: Sensitivity = NOMINAL) -> dict[int, Curve]:
        """The curves by repetition, each sorted by rate."""
        own = {
            repetition: dict(sorted(curve.items()))
            for (name, variant, repetition), curve in self._curves.items()
            if (name, variant) == (arm, sensitivity)
        }
        return dict(sorted(own.items()))

    def compared(
        self, arm: str, sensitivity: Sensitivity, is_exhausted: Callable[[MeasuredPoint], bool]
    ) -> list[Curve]:
        """The arm's curves, only with rates at which every other arm was measured or that exceed a rate which
        exhausted it: an arm that was measured at more rates would look better.
        """
        found: list[Curve] = []
        for repetition, curve in self.curves(arm, sensitivity).items():
            others = [self._curves.get((each.name, sensitivity, repetition), {}) for each in self.arms]
            shared = {
                rate: measured
                for rate, measured in curve.items()
                if all(rate in other or _is_beyond(other, rate, is_exhausted) for other in others)
            }
            if shared:
                found.append(shared)
        return found

    def at_rate(self, arm: str, rate: float, sensitivity: Sensitivity = NOMINAL) -> list[MeasuredPoint]:
        """The points of `arm` at `rate`, one for each repetition."""
        return [curve[rate] for curve in self.curves(arm, sensitivity).values() if rate in curve]

    @property
    def calm_rate(self) -> float:
        return self.calm_rates[NOMINAL]

    @cached_property
    def calm_rates(self) -> dict[Sensitivity, float]:
        """By variant, the highest rate at which every arm was measured and none was saturated; else the lowest rate."""
        return {variant: self._calm_rate(variant) for variant in self.variants}

    def _calm_rate(self, variant: Sensitivity) -> float:
        rates = sorted({point.rate for point in self.measured if point.sensitivity == variant})
        there = {rate: [self.at_rate(arm.name, rate, variant) for arm in self.arms] for rate in rates}
        every = [rate for rate, by_arm in there.items() if all(by_arm)]
        calm = [
            rate for rate in every if not any(m.result.is_saturated for by_arm in there[rate] for m in by_arm)
        ]
        return max(calm, default=min(every, default=rates[0]))

    @cached_property
    def percentiles(self) -> tuple[int, ...]:
        """The percentiles that the number of requests supports: p99 needs a hundred."""
        fewest = min(len(measured.result.requests) for measured in self.measured.values())
        return tuple(percent for percent in PERCENTILES if fewest * (100 - percent) >= 100)

    def goodput(self, arm: str, rate: float, slo: Slo) -> float:
        """Requests/s, the median of the repetitions; 0 at a rate above the one that saturated the arm."""
        return median([measured.goodput(slo).requests_s for measured in self.at_rate(arm, rate)] or [0.0])

    def peak_rate(self, arm: str, slo: Slo) -> float:
        """The rate at which the arm's goodput is highest."""
        rates = {rate for curve in self.curves(arm).values() for rate in curve}
        return max(sorted(rates), key=lambda rate: self.goodput(arm, rate, slo))

    def knee(self, arm: str, slo: Slo) -> float | None:
        """The highest rate up to which nearly all requests keep the SLO, and were sent at that rate."""
        knee = None
        for rate in self.rates:
            at_rate = self.at_rate(arm, rate)
            shares = [measured.goodput(slo).share for measured in at_rate]
            if shares and (median(shares) < ENOUGH_IN_TIME or not all(each.is_offered for each in at_rate)):
                break
            knee = rate if shares else knee
        return knee

    def without_doubtful_rates(self, software: SoftwareShares) -> Sweep:
        """This sweep with only the rates, in each variant, below the first at which an answer failed, requests were not
        sent at that rate, or our own software took more than MOST_SOFTWARE of a time that matters.
        """
        first_bad: dict[Sensitivity, float] = {}
        reasons: list[Doubt] = []
        # One time scale that suffices for all points, since a run has one.
        slow_enough = max(
            (_slow_enough(measured, software) for measured in self.measured.values()), default=0.0
        )
        for point, measured in sorted(self.measured.items(), key=lambda item: item[0].rate):
            doubt = _doubt(measured, software, self.is_modelled, slow_enough)
            if doubt and point.sensitivity not in first_bad:
                first_bad[point.sensitivity] = point.rate
                where = f" with {shown(point.sensitivity)}" if point.sensitivity != NOMINAL else ""
                why = f"from {point.rate:g} requests/s on{where}: {doubt} in {point.arm}"
                reasons.append(replace(doubt, why=why))
        kept = {
            point: measured
            for point, measured in self.measured.items()
            if point.rate < first_bad.get(point.sensitivity, float("inf"))
        }
        return replace(self, measured=kept, left_out=tuple(reasons))


def _is_beyond(curve: Curve, rate: float, is_exhausted: Callable[[MeasuredPoint], bool]) -> bool:
    return bool(curve) and rate > max(curve) and is_exhausted(curve[max(curve)])


def _doubt(measured: MeasuredPoint, software: SoftwareShares, is_modelled: bool, slow_enough: float) -> Doubt:
    """Why this point supports no conclusion."""
    result = measured.result
    if measured.errors:
        return Doubt(
            f"{measured.errors} of {len(result.requests)} requests failed",
            "look into logs/ of --out for why they failed; if an arm was full, lower --rates",
        )
    if not measured.is_offered:
        clock = "slow the modelled clock with a longer --time-scale, " if is_modelled else ""
        return Doubt(
            f"the load generator sent only {rounded(measured.sent_requests_s, 3):g} requests/s",
            f"{clock}lower --rates, or leave the load generator's machine to it",
        )
    if is_modelled and not result.software:
        return Doubt(
            "the share of our own software is not known",
            "look into logs/ of --out: the workers wrote no times of their requests",
        )
    for what, share in software(measured).items() if is_modelled else ():
        if share > MOST_SOFTWARE:
            return Doubt(
                f"our own software took {_percent(share)} of {what} (most: {MOST_SOFTWARE:.0%})",
                f"slow the modelled clock with --time-scale {slow_enough:g}, or leave this machine to it",
            )
    return NO_DOUBT


def _percent(share: float) -> str:
    """With one more digit near the limit, so that a share above it does not look equal to it."""
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.1f}%"


def _slow_enough(measured: MeasuredPoint, software: SoftwareShares) -> float:
    """The time scale at which the share of our own software should be well below the limit."""
    result = measured.result
    share = max(software(measured).values(), default=0.0) if result.software else 0.0
    return rounded(1.3 * result.point.time_scale * share / MOST_SOFTWARE, 2)


def shown(sensitivity: Sensitivity) -> str:
    factors = {"prefill": sensitivity.prefill_factor, "decode": sensitivity.decode_factor}
    told = [f"{phase} steps x{factor:g}" for phase, factor in factors.items() if factor != 1]
    return " and ".join(told) or "steps as in the tables"


def sweeps_of(plan: Plan, results: Iterable[PointResult]) -> list[Sweep]:
    """One sweep for each workload and number of GPUs with a measured point, in the plan's order."""
    arms = {arm.name: arm for arm in plan.arms}
    groups: dict[tuple[str, int], dict[Point, MeasuredPoint]] = {}
    for result in results:
        gpus = arms[result.point.arm].gpus
        measured = groups.setdefault((result.point.workload, gpus), {})
        measured[result.point] = MeasuredPoint(result, arms[result.point.arm])
    return [
        _sweep(plan, workload, gpus, measured)
        for workload in plan.workloads
        for (name, gpus), measured in sorted(groups.items())
        if name == workload.name
    ]


def _sweep(plan: Plan, workload: Workload, gpus: int, measured: Mapping[Point, MeasuredPoint]) -> Sweep:
    names = {point.arm for point in measured}
    return Sweep(
        workload,
        tuple(arm for arm in plan.arms if arm.name in names),
        measured,
        plan.is_modelled,
        elsewhere=tuple(arm for arm in plan.arms if arm.gpus != gpus),
    )
