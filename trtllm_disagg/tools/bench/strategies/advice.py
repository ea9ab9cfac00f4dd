"""Says in one paragraph which order to run for a workload, why, and what would change the advice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

from trtllm_disagg.tools.bench.strategies.measures import PARTS, MeasuredPoint, Quantity, Slo
from trtllm_disagg.tools.bench.strategies.records import NOMINAL, Arm, gpu_count
from trtllm_disagg.tools.bench.strategies.sweep import Sweep, shown
from trtllm_disagg.tools.bench.strategies.verdict import (
    LEAD,
    Verdict,
    goodput,
    judge,
    number,
    past_at_every_rate,
    spread,
)

#: Factors on a limit of the SLO, the nearest first, to find where another arm becomes better.
_SLO_FACTORS = (0.8, 1.25, 0.67, 1.5, 0.5, 2.0, 0.33, 3.0, 0.25, 4.0)


@dataclass(frozen=True, slots=True)
class Advice:
    #: Its name with the number of GPUs.
    workload: str
    #: What to run, or that it is not decided.
    headline: str
    because: str
    #: The conditions under which another arm is better; if undecided, what to do next.
    changes: str
    verdict: Verdict

    @property
    def paragraph(self) -> str:
        sentences = (f"{self.workload}: {self.headline}.", self.because, self.changes)
        return " ".join(sentence for sentence in sentences if sentence)


def advise(sweep: Sweep, slo: Slo) -> Advice:
    verdict = judge(sweep, goodput(slo))
    if verdict.refusal:
        return Advice(sweep.name, f"not decided: {verdict.refusal}", "", _what_decides_it(verdict), verdict)
    arms = {arm.name: arm for arm in sweep.arms}
    clean = sweep.without_doubtful_rates(verdict.measure.software)
    if verdict.is_decided:
        headline = f"run {described(arms[verdict.best])} ({verdict.best})"
    else:
        open_arms = [verdict.best, *(lead.other for lead in verdict.doubtful)]
        headline = f"not decided between {_listed(open_arms)}: {verdict.why_not}"
    return Advice(
        sweep.name,
        headline,
        " ".join(_because(clean, slo, verdict)),
        _what_changes_it(clean, slo, verdict) if verdict.is_decided else _what_decides_it(verdict),
        verdict,
    )


def described(arm: Arm) -> str:
    """Strategy, workers and decider."""
    workers = {"agg": arm.agg_workers, "prefill": arm.prefill_workers, "decode": arm.decode_workers}
    told = [f"{count} {role} worker{'s' * (count > 1)}" for role, count in workers.items() if count]
    decider = f", decider {arm.decider}" if arm.prefill_workers and arm.strategy != "router" else ""
    return f"{arm.strategy} with {_listed(told)}{decider}"


def _because(sweep: Sweep, slo: Slo, verdict: Verdict) -> Iterator[str]:
    best, measure = verdict.best, verdict.measure
    score = spread(verdict.scores[best][NOMINAL])
    if verdict.is_decided:
        rate = sweep.peak_rate(best, slo)
        tokens = median(each.goodput(slo).tokens_s_gpu for each in sweep.at_rate(best, rate))
        told = f"It answers up to {score} requests/s within {slo} on {gpu_count(sweep.arms[0].gpus)}"
        yield f"{told} ({number(tokens)} tok/s/GPU); {_listed(_against(sweep, verdict))}."
    elif verdict.beaten:
        yield f"Behind {best} ({score} {measure.unit}): {_listed(_against(sweep, verdict))}."
    if verdict.beaten:
        yield _difference(sweep, slo, best, verdict.beaten[0].other)


def _against(sweep: Sweep, verdict: Verdict) -> list[str]:
    def one(other: str, factor: float) -> str:
        lowest = past_at_every_rate(sweep, verdict.measure, other)
        if lowest is not None:
            lead = verdict.scores[verdict.best][NOMINAL].median / lowest - 1
            return f"{other} less than {lowest:g}, the lowest rate compared (a lead of at least {lead:.0%})"
        score = verdict.scores[other][NOMINAL]
        return f"{other} up to {spread(score)}" + (
            "" if math.isinf(factor) else f" (a lead of {factor - 1:.0%})"
        )

    return [one(lead.other, lead.factor) for lead in verdict.beaten]


def _difference(sweep: Sweep, slo: Slo, best: str, other: str) -> str:
    """Which limit `other` breaks at a rate at which `best` keeps them, and where its requests lose time."""
    rate = sweep.knee(best, slo) or sweep.peak_rate(best, slo)
    ours, theirs = sweep.at_rate(best, rate), sweep.at_rate(other, rate)
    if not theirs:
        return f"{other} is saturated at {rate:g} requests/s."
    kept = [
        f"{name.upper()} for {_share(theirs, name, limit):.0%} of the requests "
        f"({best}: {_share(ours, name, limit):.0%})"
        for name, limit in slo.limits.items()
    ]
    told = f"At {rate:g} requests/s {other} keeps {_listed(kept)}"
    parts = {name: _part(theirs, name) - _part(ours, name) for name in PARTS}
    longest = max(parts, key=lambda name: parts[name])
    if parts[longest] > 0:
        told += f", and a request spends {number(parts[longest])} ms more in {longest.replace('_', ' ')}"
    return told + "."


def _share(measured: Iterable[MeasuredPoint], name: Quantity, limit: float) -> float:
    return median(float(each.keeps(name, limit).mean()) for each in measured)


def _part(measured: Iterable[MeasuredPoint], name: str) -> float:
    return median(each.mean_parts.get(name, 0.0) for each in measured)


def _what_changes_it(sweep: Sweep, slo: Slo, verdict: Verdict) -> str:
    conditions = [_other_rate(sweep, slo, verdict.best), _band(verdict), _other_slo(sweep, slo, verdict.best)]
    return f"What changes it: {'; '.join(conditions)}."


def _what_decides_it(verdict: Verdict) -> str:
    return f"What decides it: {verdict.what_next} (other settings need another --out)."


def _other_rate(sweep: Sweep, slo: Slo, best: str) -> str:
    """The nearest rate at which another arm is better; if there is none, up to which rate all arms are alike."""
    peak = sweep.peak_rate(best, slo)
    rates = sorted(sweep.rates, key=lambda rate: abs(math.log(rate / peak)))
    for rate in rates:
        others = {arm.name: sweep.goodput(arm.name, rate, slo) for arm in sweep.arms if arm.name != best}
        other = max(others, key=lambda name: others[name])
        ours = sweep.goodput(best, rate, slo)
        if others[other] > LEAD * ours:
            return (
                f"at {rate:g} requests/s {other} is better ({number(others[other])} against {number(ours)})"
            )
    # Only the lowest rates: at the highest ones arms are alike again, because no answer is in time.
    alike = list(takewhile(lambda rate: _is_alike(sweep, slo, rate), sweep.rates))
    if alike:
        return f"up to {max(alike):g} requests/s all arms do alike; at no rate measured did another one do better"
    return "at no rate measured did another arm do better"


def _is_alike(sweep: Sweep, slo: Slo, rate: float) -> bool:
    values = [sweep.goodput(arm.name, rate, slo) for arm in sweep.arms]
    return max(values) <= LEAD * min(values)


def _band(verdict: Verdict) -> str:
    smallest = min(verdict.leads, key=lambda lead: lead.lowest)
    if len(verdict.scores[verdict.best]) < 2:
        return "no band: the times were measured, not modelled"
    error = max(variant.change for variant in verdict.scores[verdict.best])
    steps = f"not step times of prefill or decode that are {error:.0%} shorter or longer"
    if math.isinf(smallest.lowest):
        return f"{steps}: there too no other arm keeps the SLO"
    where = shown(smallest.lowest_at)
    if smallest.lowest < LEAD:
        return f"with {where} the lead over {smallest.other} is gone ({smallest.lowest - 1:+.0%})"
    return f"{steps}: the lead is {smallest.lowest - 1:+.0%} at least, over {smallest.other}, with {where}"


def _other_slo(sweep: Sweep, slo: Slo, best: str) -> str:
    """The nearest stricter or looser SLO under which another arm is better, by the same judgement."""
    for factor in _SLO_FACTORS:
        for name in slo.limits:
            other_slo = slo.scaled(name, factor)
            verdict = judge(sweep, goodput(other_slo))
            if any(lead.other == best for lead in verdict.beaten):
                theirs, ours = (number(verdict.scores[arm][NOMINAL].median) for arm in (verdict.best, best))
                better = f"{verdict.best} is better ({theirs} against {ours} requests/s)"
                return f"with {name.upper()} {other_slo.limits[name]:g} ms {better}"
    return (
        "no SLO from a quarter to four times this one, one limit changed at a time, makes another arm better"
    )


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
