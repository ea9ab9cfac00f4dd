"""Judges which arm is best by one measure, and whether that is certain enough to be said.

That is so if the best arm leads by more than its repetitions differ, the rates are high enough to exhaust the others,
and the sensitivity band does not overturn the result. The verdict uses no rate at which an answer failed, requests were
not sent in time or our own software took much of what is compared, and compares only arms with the same number of GPUs
(sweep.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from trtllm_disagg.tools.bench.figures import Sample, rounded
from trtllm_disagg.tools.bench.strategies.measures import MeasuredPoint, Slo, front_area
from trtllm_disagg.tools.bench.strategies.records import NOMINAL, Sensitivity
from trtllm_disagg.tools.bench.strategies.sweep import (
    ENOUGH_IN_TIME,
    GO_ON,
    MOST_SOFTWARE,
    NO_DOUBT,
    Curve,
    Doubt,
    SoftwareShares,
    Sweep,
    WantedRate,
    remedies,
    shown,
)

#: The smallest ratio that counts as a lead: two runs of the same arm differ by some of it.
LEAD = 1.05
#: The same for points that were measured once, so that their spread is not known.
LEAD_ONCE = 1.10
#: By arm and variant: one value for each repetition.
Scores = Mapping[str, Mapping[Sensitivity, Sample]]
#: Fewest requests of a point: with fewer, one late answer makes a lead.
FEWEST_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class Measure:
    label: str
    unit: str
    #: The score of one repetition of an arm.
    score: Callable[[Curve], float]
    #: The shares of our own software that matter for this measure.
    software: SoftwareShares
    higher_is_better: bool = True
    #: Whether the score cannot be better at a higher rate than this point's.
    is_exhausted: Callable[[MeasuredPoint], bool] = lambda measured: True
    #: Whether the score may be better at a lower rate than this point's. It is at most that rate.
    may_be_past: Callable[[MeasuredPoint], bool] = lambda measured: False

    def ratio(self, arm: float, other: float) -> float:
        """How many times as good as `other` the arm is; above 1: it is better."""
        better, worse = (arm, other) if self.higher_is_better else (other, arm)
        if math.isnan(better) or math.isnan(worse):
            return math.nan
        return better / worse if worse else math.inf if better else 1.0


def _software_in(measured: MeasuredPoint, time: str) -> dict[str, float]:
    shares = measured.result.software
    return {time.upper(): shares[time]} if time in shares else {}


def _software_in_goodput(measured: MeasuredPoint, slo: Slo) -> dict[str, float]:
    """The shares in TPOT and latency, since a request that stays longer takes a place in batches for longer; and in
    each time that the SLO limits, if our software makes many answers late by that limit.
    """
    stays = {"latency": measured.result.software["latency"]} | _software_in(measured, "tpot")
    matters = (limit for limit in slo.limits if measured.lost_to_software(slo, limit) > MOST_SOFTWARE)
    return stays | {name: share for limit in matters for name, share in _software_in(measured, limit).items()}


def goodput(slo: Slo) -> Measure:
    def is_late(measured: MeasuredPoint) -> bool:
        return measured.goodput(slo).share < ENOUGH_IN_TIME

    return Measure(
        f"highest goodput, {slo}",
        "requests/s",
        lambda curve: max(measured.goodput(slo).requests_s for measured in curve.values()),
        partial(_software_in_goodput, slo=slo),
        is_exhausted=lambda measured: measured.result.is_saturated or is_late(measured),
        may_be_past=is_late,
    )


def pareto_area() -> Measure:
    return Measure(
        "fast for each user and much from each GPU (area under the Pareto front)",
        "tok/s/user x tok/s/GPU",
        lambda curve: front_area(measured.pareto_point for measured in curve.values()),
        partial(_software_in, time="tpot"),
        is_exhausted=lambda measured: measured.result.is_saturated,
    )


def latency_at(rates: Mapping[Sensitivity, float], name: Literal["ttft", "tpot"], percent: int) -> Measure:
    """`rates`: by variant, since slower steps need lower rates."""

    def score(curve: Curve) -> float:
        variant = next(iter(curve.values())).result.point.sensitivity
        rate = rates[variant]
        return curve[rate].percentile(name, percent) if rate in curve else math.nan

    return Measure(
        f"{name.upper()} p{percent} at {rates[NOMINAL]:g} requests/s",
        "ms",
        score,
        partial(_software_in, time=name),
        higher_is_better=False,
    )


@dataclass(frozen=True, slots=True)
class Lead:
    """The lead of the best arm over another one, as a factor: 1.2 is a fifth better."""

    other: str
    factor: float
    #: The smallest factor of the sensitivity band, and on which side.
    lowest: float
    lowest_at: Sensitivity
    #: Why the lead is not certain.
    doubt: Doubt = NO_DOUBT


@dataclass(frozen=True, slots=True)
class Verdict:
    measure: Measure
    scores: Scores
    #: The arm with the best median; named as the winner only if `is_decided`.
    best: str
    #: The leads over every other arm, the smallest first.
    leads: tuple[Lead, ...] = ()
    #: Why no arms can be compared at all.
    refusal: Doubt = NO_DOUBT
    #: Which rates were not used, and why.
    left_out: tuple[Doubt, ...] = ()

    @property
    def is_decided(self) -> bool:
        return not self.refusal and all(not lead.doubt for lead in self.leads)

    @property
    def is_tie(self) -> bool:
        """Whether the best arm and those that it does not beat are alike."""
        return not self.refusal and bool(self.doubtful) and all(lead.doubt.is_tie for lead in self.doubtful)

    @property
    def doubtful(self) -> tuple[Lead, ...]:
        return tuple(lead for lead in self.leads if lead.doubt)

    @property
    def beaten(self) -> tuple[Lead, ...]:
        return () if self.refusal else tuple(lead for lead in self.leads if not lead.doubt)

    @property
    def winner(self) -> str | None:
        return self.best if self.is_decided else None

    @property
    def why_not(self) -> str:
        """Empty if decided."""
        return "; ".join(str(doubt) for doubt in self._doubts)

    @property
    def what_next(self) -> str:
        """What to do for a decision; empty if decided."""
        return remedies(self._doubts)

    @property
    def _doubts(self) -> list[Doubt]:
        return [self.refusal] if self.refusal else [lead.doubt for lead in self.doubtful]


def judge(sweep: Sweep, measure: Measure) -> Verdict:
    clean = sweep.without_doubtful_rates(measure.software)
    scores = {arm.name: _scores(clean, measure, arm.name) for arm in sweep.arms}
    scores = {name: by_variant for name, by_variant in scores.items() if NOMINAL in by_variant}
    nominal = {name: by_variant[NOMINAL].median for name, by_variant in scores.items()}
    known = {name: value for name, value in nominal.items() if not math.isnan(value)}
    pick = max if measure.higher_is_better else min
    best = pick(known, key=known.__getitem__, default="")
    refusal = _refusal(sweep, clean, known)
    if refusal:
        return Verdict(measure, scores, best, refusal=refusal, left_out=clean.left_out)
    comparison = _Comparison(clean, measure, scores, best)
    leads = [comparison.lead(other) for other in scores if other != best]
    leads.sort(key=lambda lead: lead.factor)
    return Verdict(measure, scores, best, tuple(leads), left_out=clean.left_out)


def _scores(sweep: Sweep, measure: Measure, arm: str) -> dict[Sensitivity, Sample]:
    found = {
        variant: Sample.of(map(measure.score, sweep.compared(arm, variant, measure.is_exhausted)))
        for variant in sweep.variants
    }
    return {variant: sample for variant, sample in found.items() if sample.values}


def _refusal(sweep: Sweep, clean: Sweep, scores: Mapping[str, float]) -> Doubt:
    if len(sweep.arms) < 2:
        others = ", ".join(f"{arm.name} has {arm.gpus}" for arm in sweep.elsewhere)
        why = "no other arm was measured on as many GPUs" + (f": {others}" if others else "")
        return Doubt(
            why, "choose two arms or more with --arms, or a --url for each, and one number of workers"
        )
    fewest = min(len(measured.result.requests) for measured in sweep.measured.values())
    if fewest < FEWEST_REQUESTS:
        return Doubt(f"a point has only {fewest} requests", f"give {FEWEST_REQUESTS} --requests at least")
    missing = [arm.name for arm in sweep.arms if arm.name not in scores]
    if missing and clean.left_out:
        return Doubt(f"no rate is left to compare: {clean.left_out[0]}", clean.left_out[0].remedy)
    if missing:
        return Doubt(f"no rate was measured that all arms share ({', '.join(missing)} lacks it)", GO_ON)
    if not any(scores.values()):
        return Doubt("no arm keeps it at any rate that was measured", "lower --rates, or give a looser --slo")
    lacking = _lacking_of_band(clean) if sweep.is_modelled else []
    if lacking:
        why = "; ".join(map(str, clean.left_out)) or "not measured for every arm"
        return Doubt(
            f"the sensitivity band lacks {', '.join(lacking)} ({why})",
            remedies(clean.left_out) or (GO_ON if len(sweep.variants) > 1 else "leave --band at 0.5"),
        )
    return NO_DOUBT


def _lacking_of_band(sweep: Sweep) -> list[str]:
    """The four sides of the band: faster and slower, prefill and decode apart."""
    measured = [
        variant for variant in sweep.variants if all(sweep.curves(arm.name, variant) for arm in sweep.arms)
    ]
    sides = {
        "prefill faster": any(v.prefill_factor < 1 for v in measured),
        "prefill slower": any(v.prefill_factor > 1 for v in measured),
        "decode faster": any(v.decode_factor < 1 for v in measured),
        "decode slower": any(v.decode_factor > 1 for v in measured),
    }
    return [side for side, is_measured in sides.items() if not is_measured]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The best arm beside the others, by one measure."""

    sweep: Sweep
    measure: Measure
    scores: Scores
    best: str

    def lead(self, other: str) -> Lead:
        ours, theirs = self.scores[self.best], self.scores[other]
        factors = {
            variant: self.measure.ratio(ours[variant].median, theirs[variant].median)
            for variant in ours
            if variant in theirs
        }
        # A variant without a number proves nothing, so it counts as the lowest.
        lowest_at = min(factors, key=lambda variant: (not math.isnan(factors[variant]), factors[variant]))
        lowest, factor = factors[lowest_at], factors[NOMINAL]
        doubts = (
            # First, since the scores of arms that could take more are not known.
            self._doubt_of_rates(other, NOMINAL),
            self._doubt_of_lower_rates(other),
            # Before the band, which says nothing about arms that are alike.
            self._doubt_of_repetitions(other),
            *(self._doubt_of_rates(other, variant) for variant in factors),
            _doubt_of_band(self.best, other, lowest, lowest_at),
        )
        return Lead(other, factor, lowest, lowest_at, next(filter(None, doubts), NO_DOUBT))

    def _doubt_of_repetitions(self, other: str) -> Doubt:
        best, measure = self.best, self.measure
        ours, theirs = self.scores[best][NOMINAL], self.scores[other][NOMINAL]
        ranges = f"{spread(ours)} against {spread(theirs)} {measure.unit}"
        once = min(len(ours.values), len(theirs.values)) < 2
        needed = LEAD_ONCE if once else LEAD
        if not measure.ratio(ours.median, theirs.median) >= needed:
            measured = ", each measured once" if once else ""
            return Doubt(
                f"{best} and {other} differ by less than {needed - 1:.0%} ({ranges}{measured})",
                f"leave --quick out, or give --repetitions 3: then {LEAD - 1:.0%} are enough"
                if once
                else f"nothing, {best} and {other} do alike: take the one that is simpler to run",
                is_tie=True,
            )
        # The same repetition has the same prompts and arrivals in both arms, so they are compared in pairs.
        if not all(measure.ratio(a, b) > 1 for a, b in zip(ours.values, theirs.values, strict=False)):
            why = f"repetitions differ by more than {best} and {other} do ({ranges})"
            return Doubt(why, "double --requests")
        return NO_DOUBT

    def _doubt_of_rates(self, other: str, variant: Sensitivity) -> Doubt:
        """A doubt if the arm was not exhausted, since its score is not known then."""
        is_exhausted = self.measure.is_exhausted
        highest_points = [curve[max(curve)] for curve in self.sweep.compared(other, variant, is_exhausted)]
        if any(map(is_exhausted, highest_points)):
            return NO_DOUBT
        highest = max(measured.result.point.rate for measured in highest_points)
        needed = max(map(_requests_to_fill, highest_points))
        fewest = min(len(measured.result.requests) for measured in highest_points)
        why = (
            f"{other} could take more than {highest:g} requests/s, the highest rate compared{_with(variant)}"
        )
        if fewest < needed:
            return Doubt(why, f"give --requests {needed}: with {fewest} all have come before GPUs are full")
        wanted = WantedRate(variant, rounded(1.5 * highest, 3), highest)
        return Doubt(why, f"give --rates of your own, up to {wanted.requests_s:,g}", wanted=wanted)

    def _doubt_of_lower_rates(self, other: str) -> Doubt:
        lowest = past_at_every_rate(self.sweep, self.measure, other)
        if lowest is None or self.scores[self.best][NOMINAL].median >= LEAD_ONCE * lowest:
            return NO_DOUBT
        wanted = WantedRate(NOMINAL, rounded(lowest / 2, 3), lowest)
        return Doubt(
            f"{other} may do better below {lowest:g} requests/s, the lowest rate compared",
            f"give --rates of your own, down to {wanted.requests_s:,g}",
            wanted=wanted,
        )


def _requests_to_fill(measured: MeasuredPoint) -> int:
    """The requests that arrive during two answers: only then do as many end as arrive, and a queue shows."""
    answer = measured.percentile("latency", 50)
    return 0 if math.isnan(answer) else math.ceil(2 * measured.result.point.rate * answer / 1000)


def past_at_every_rate(sweep: Sweep, measure: Measure, arm: str) -> float | None:
    """The lowest rate compared, if the arm is past its best there already: its score is unknown, but below this rate.
    None: its best was measured.
    """
    curves = sweep.compared(arm, NOMINAL, measure.is_exhausted)
    lowest = min(min(curve) for curve in curves)
    return lowest if any(measure.may_be_past(curve[min(curve)]) for curve in curves) else None


def _doubt_of_band(best: str, other: str, lowest: float, lowest_at: Sensitivity) -> Doubt:
    if math.isnan(lowest):
        return Doubt(f"{best} and {other} were not both measured{_with(lowest_at)}", GO_ON)
    if lowest * LEAD > 1:
        return NO_DOUBT
    better = f"{1 / lowest - 1:.0%} better than" if lowest else "good for something, unlike"
    return Doubt(
        f"the band overturns it:{_with(lowest_at)} {other} is {better} {best}",
        "measure step times of your GPU (modelled.measured), or give a narrower --band if the tables are that good",
    )


def _with(variant: Sensitivity) -> str:
    return f" with {shown(variant)}" if variant != NOMINAL else ""


def spread(sample: Sample) -> str:
    """The median and, in brackets, the lowest and the highest repetition."""
    low, high = min(sample.values), max(sample.values)
    return number(sample.median) + (f" ({number(low)} to {number(high)})" if len(sample.values) > 1 else "")


def number(value: float) -> str:
    """`value` with three digits: more would be noise."""
    if math.isnan(value):
        return "-"
    return f"{rounded(value, 3):,g}" if abs(value) < 1e6 else f"{value:.3g}"
