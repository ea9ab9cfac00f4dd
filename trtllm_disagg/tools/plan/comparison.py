"""Which layout of a number of workers keeps an SLO up to the highest rate, and under which SLOs another one would.

An event simulation on the tables (simulation.py) takes seconds and starts nothing. Our own software takes no time in
it, so orders, which differ in software only, are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trtllm_disagg.tools.plan.layouts import Layout, one_of_each
from trtllm_disagg.tools.plan.modelled_gpus import Engines
from trtllm_disagg.tools.plan.simulation import ModelledWorker, Simulations
from trtllm_disagg.tools.plan.slo import ENOUGH_IN_TIME, Slo
from trtllm_disagg.tools.plan.workloads import Shape, Traffic

#: The compared limits of TTFT and TPOT, as factors of what a lone request takes.
FIRST_TOKEN_FACTORS = (2.0, 4.0, 10.0)
TOKEN_FACTORS = (1.15, 1.3, 1.6, 2.0, 3.0)
#: Layouts within this factor count as alike: the simulation is not more precise.
ALIKE = 1.1
_FEWEST_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class LayoutLead:
    """How far the best layout is ahead of the best one of the other kind (agg, or separate workers)."""

    layout: str
    #: The ratio of their rates. None if the other kind keeps the SLO at no rate.
    ratio: float | None

    @property
    def is_separate(self) -> bool:
        return is_separate(self.layout)

    @property
    def is_clear(self) -> bool:
        return self.ratio is None or self.ratio >= ALIKE

    def __str__(self) -> str:
        if not self.is_clear:
            return "alike"
        return f"{self.layout} alone" if self.ratio is None else f"{self.layout} {self.ratio:.1f}x"


@dataclass(frozen=True, slots=True)
class LeadUnderLimits:
    """The lead under limits in milliseconds; None: no layout keeps them."""

    ttft: float
    tpot: float
    lead: LayoutLead | None


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """One layout under the SLO. Rates in requests/s; times in milliseconds, medians at that rate."""

    #: The highest rate at which nearly all answers are in time; 0 if there is none.
    rate: float
    ttft: float
    tpot: float
    tokens_s_gpu: float


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """The result for one workload on a number of GPUs."""

    #: What is served, as "llama-3.1-8b on h100_sxm, 1 GPU a worker".
    subject: str
    workload: str
    #: Mean tokens of prompts and answers, in words.
    description: str
    gpus: int
    slo: Slo
    #: TTFT and TPOT of a lone request.
    ttft_alone: float
    tpot_alone: float
    #: By layout.
    layouts: dict[str, LayoutResult]
    by_limits: tuple[LeadUnderLimits, ...]

    def sentence(self) -> str:
        """What to run, up to which rate, and what the best layout of the other kind does."""
        best = max(self.layouts, key=lambda name: self.layouts[name].rate)
        head = f"{self.workload} on {self.gpus} GPUs ({self.subject}), {self.slo}"
        if not self.layouts[best].rate:
            return f"{head}: no layout keeps the limits at any rate."
        others = [name for name in self.layouts if is_separate(name) is not is_separate(best)]
        other = max(others, key=lambda name: self.layouts[name].rate)
        behind = self.layouts[other].rate
        beside = (
            f"{other} keeps the limits up to {behind:.3g}"
            if behind
            else f"{other} keeps the limits at no rate"
        )
        return f"{head}: run {best} up to {self.layouts[best].rate:.3g} requests/s; {beside}."


class LayoutSimulation:
    """Simulates the layouts of the same number of GPUs under one workload."""

    def __init__(
        self, layouts: Sequence[Layout], traffic: Traffic, workers: Mapping[str, ModelledWorker]
    ) -> None:
        """`layouts`: one for each number of workers of each role."""
        self._simulations = Simulations(layouts, traffic, workers, _FEWEST_REQUESTS)
        shape = traffic.shape
        #: TTFT and TPOT of a lone request.
        self.first_token_ms = 1000 * min(worker.prefill_seconds(shape) for worker in workers.values())
        self.token_ms = 1000 * min(_token_seconds(worker, shape) for worker in workers.values())

    def results(self, slo: Slo) -> dict[str, LayoutResult]:
        return {layout.workers: self._result(layout, slo) for layout in self._simulations.layouts}

    def _result(self, layout: Layout, slo: Slo) -> LayoutResult:
        rate = self._simulations.knee(layout, slo)
        at_rate = self._simulations.at(layout, rate)
        if at_rate.goodput_share(slo) < ENOUGH_IN_TIME:
            return LayoutResult(0.0, 0.0, 0.0, 0.0)
        ttft, tpot = (1000 * median(at_rate.times[name]) for name in ("ttft", "tpot"))
        tokens = rate * self._simulations.traffic.shape.output_tokens / layout.gpus
        return LayoutResult(rate, ttft, tpot, tokens)

    def rates(self, slo: Slo) -> dict[str, float]:
        """By layout, the highest requests a second at which nearly all answers are in time; 0 if there is none."""
        return {name: result.rate for name, result in self.results(slo).items()}

    def lead(self, slo: Slo) -> LayoutLead | None:
        """None if no layout keeps the SLO."""
        rates = self.rates(slo)
        best = max(rates, key=rates.__getitem__)
        if not rates[best]:
            return None
        others = (rate for layout, rate in rates.items() if is_separate(layout) is not is_separate(best))
        other = max(others, default=0.0)
        return LayoutLead(best, rates[best] / other if other else None)

    def slo(self, first_token_factor: float, token_factor: float) -> Slo:
        """Limits as multiples of what a lone request takes."""
        return Slo(
            ttft=_three_digits(first_token_factor * self.first_token_ms),
            tpot=_three_digits(token_factor * self.token_ms),
        )


def _three_digits(number: float) -> float:
    return float(f"{number:.3g}")


def _token_seconds(worker: ModelledWorker, shape: Shape) -> float:
    after_first = worker.isolated_seconds(shape) - worker.prefill_seconds(shape)
    return after_first / max(1.0, shape.output_tokens)


def is_separate(layout: str) -> bool:
    """Whether prefill and decode have workers of their own."""
    return not layout.endswith(" agg")


def compare_layouts(
    engines: Engines, counts: Sequence[int], workloads: Sequence[Traffic], slo: Slo
) -> list[LayoutComparison]:
    """One comparison for each workload and number of workers. Raises ConfigError for what no table covers."""
    workers = engines.workers()
    return [
        _compare(engines.subject(), one_of_each(count, engines.gpus_per_worker), traffic, workers, slo)
        for traffic in workloads
        for count in counts
    ]


def _compare(
    subject: str, layouts: Sequence[Layout], traffic: Traffic, workers: Mapping[str, ModelledWorker], slo: Slo
) -> LayoutComparison:
    simulated = LayoutSimulation(layouts, traffic, workers)
    limits = [simulated.slo(first, token) for first in FIRST_TOKEN_FACTORS for token in TOKEN_FACTORS]
    return LayoutComparison(
        subject=subject,
        workload=traffic.name,
        description=traffic.description,
        gpus=layouts[0].gpus,
        slo=slo,
        ttft_alone=simulated.first_token_ms,
        tpot_alone=simulated.token_ms,
        layouts=simulated.results(slo),
        by_limits=tuple(
            LeadUnderLimits(each.limits["ttft"], each.limits["tpot"], simulated.lead(each)) for each in limits
        ),
    )
