"""Which layout of a number of workers keeps an SLO up to the highest rate, and under which SLOs another one would.

An event simulation on the tables (simulation.py) takes seconds and starts nothing. Our own software takes no time in
it, so orders, which differ in software only, are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from trtllm_disagg.tools.plan.layouts import Layout, one_of_each
from trtllm_disagg.tools.plan.modelled_gpus import Engines
from trtllm_disagg.tools.plan.simulation import (
    ModelledWorker,
    SimulatedPoint,
    capacity,
    knee,
    requests_to_fill,
    simulate,
)
from trtllm_disagg.tools.plan.slo import ENOUGH_IN_TIME, Slo
from trtllm_disagg.tools.plan.workloads import Traffic

#: The compared limits of TTFT and TPOT, as factors of what a lone request takes.
FIRST_TOKEN_FACTORS = (2.0, 4.0, 10.0)
TOKEN_FACTORS = (1.15, 1.3, 1.6, 2.0, 3.0)
#: Without --rates: shares of the rate up to which the best layout keeps the limits.
SHARES = (0.25, 0.5, 0.75, 1.0, 1.25)
#: Layouts within this factor count as alike: the simulation is not more precise.
ALIKE = 1.1
#: With a hundred, one series of random arrivals moves the rate by a third, with four hundred by a tenth.
_FEWEST_REQUESTS = 400
#: The shortest point, in conversations: then only one request in twelve continues a conversation that was under way at
#: the beginning and is in no cache.
_SESSIONS = 1.5


@dataclass(frozen=True, slots=True)
class LayoutLead:
    """How far the best layout is ahead of the best one of the other kind (agg, or separate workers)."""

    layout: str
    #: The ratio of their rates. None if the other kind keeps the SLO at no rate.
    ratio: float | None

    def __str__(self) -> str:
        if self.ratio is None:
            return f"{self.layout} alone"
        return f"{self.layout} {self.ratio:.1f}x" if self.ratio >= ALIKE else "alike"


@dataclass(frozen=True, slots=True)
class LeadUnderLimits:
    """The lead under limits in milliseconds; None: no layout keeps them."""

    ttft: float
    tpot: float
    lead: LayoutLead | None


@dataclass(frozen=True, slots=True)
class AtRate:
    """One layout at a rate in requests/s. Times in milliseconds, medians."""

    rate: float
    ttft: float
    tpot: float
    #: The share of the rate that is answered within the limits.
    in_time: float

    @property
    def keeps_limits(self) -> bool:
        return self.in_time >= ENOUGH_IN_TIME


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """One layout under the SLO. Rates in requests/s; times in milliseconds, medians at that rate."""

    #: A strategy of this layout, for `up`.
    strategy: str
    #: The highest rate at which nearly all answers are in time; 0 if there is none.
    rate: float
    ttft: float
    tpot: float
    tokens_s_gpu: float
    #: At the same rates for all layouts.
    at: tuple[AtRate, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """The result for one workload on a number of GPUs."""

    #: "llama-3.1-8b", and "H100", or "GPU" if its name is not known.
    model: str
    gpu: str
    gpus: int
    gpus_per_worker: int
    workload: str
    #: The workload and its mean lengths in words.
    description: str
    slo: Slo
    #: TTFT and TPOT of a lone request.
    ttft_alone: float
    tpot_alone: float
    #: By number of workers of each role.
    layouts: dict[str, LayoutResult]
    by_limits: tuple[LeadUnderLimits, ...]

    @property
    def subject(self) -> str:
        """What is compared, and under which limits."""
        each = f", {self.gpus_per_worker} a worker" if self.gpus_per_worker > 1 else ""
        return f"{self.gpus} {self.gpu}s{each} ({self.model}; {self.description}; {self.slo})"

    def sentence(self) -> str:
        """What to run, up to which rate, and what the best layout of the other kind does."""
        rates = {name: result.rate for name, result in self.layouts.items()}
        best = max(rates, key=rates.__getitem__)
        other = max(
            (name for name in rates if is_separate(name) is not is_separate(best)), key=rates.__getitem__
        )
        if not rates[best]:
            alone = f"a lone request has TTFT {self.ttft_alone:.3g} ms and TPOT {self.tpot_alone:.3g} ms"
            return f"{self.subject}: no layout keeps the limits at any rate; {alone}"
        up_to = f"up to {_rounded(rates[best])} requests/s"
        if rates[best] < ALIKE * rates[other]:
            alike = f"less than {ALIKE - 1:.0%} apart, which the simulation cannot tell"
            return f"{self.subject}: run {self._named(best)} or {self._named(other)}, {up_to}: {alike}"
        keeps = "keeps" if is_separate(other) else "keep"
        behind = f"up to {_rounded(rates[other])}" if rates[other] else "at no rate"
        return f"{self.subject}: run {self._named(best)} {up_to}; {self._named(other)} {keeps} the limits {behind}"

    def _named(self, layout: str) -> str:
        """As `bench strategies` names it, which runs it."""
        return f"{layout} {self.layouts[layout].strategy}" if is_separate(layout) else layout


def _rounded(rate: float) -> str:
    """With two digits: the simulation finds a rate to 5 %."""
    return f"{float(f'{rate:.2g}'):g}"


class LayoutSimulation:
    """Simulates the layouts of the same number of GPUs under one workload."""

    def __init__(
        self, layouts: Sequence[Layout], traffic: Traffic, workers: Mapping[str, ModelledWorker]
    ) -> None:
        """`workers` by role. Layouts that differ only in their strategy are simulated once."""
        self._layouts = {layout.workers: layout for layout in layouts}
        self._traffic, self._workers = traffic, workers
        self._points: dict[tuple[str, float], SimulatedPoint] = {}
        #: TTFT and TPOT of a lone request.
        self.first_token_ms = 1000 * min(each.prefill_seconds(traffic.shape) for each in workers.values())
        self.token_ms = 1000 * min(each.token_seconds(traffic.shape, 1) for each in workers.values())

    def results(self, slo: Slo, rates: Sequence[float] = ()) -> dict[str, LayoutResult]:
        """By number of workers of each role, at `rates` too."""
        return {name: self._result(layout, slo, rates) for name, layout in self._layouts.items()}

    def _result(self, layout: Layout, slo: Slo, rates: Sequence[float]) -> LayoutResult:
        at = tuple(self._times(layout, rate, slo) for rate in rates)
        most = self._times(layout, self.knee(layout, slo), slo)
        if not most.keeps_limits:
            return LayoutResult(layout.strategy, 0.0, 0.0, 0.0, 0.0, at)
        tokens = most.rate * self._traffic.shape.output_tokens / layout.gpus
        return LayoutResult(layout.strategy, most.rate, most.ttft, most.tpot, tokens, at)

    def _times(self, layout: Layout, rate: float, slo: Slo) -> AtRate:
        point = self._at(layout, rate)
        ttft, tpot = (1000 * median(point.times[name]) for name in ("ttft", "tpot"))
        return AtRate(rate, ttft, tpot, point.goodput_share(slo))

    def best_knee(self, slo: Slo) -> float:
        return max(self.knee(layout, slo) for layout in self._layouts.values())

    def knee(self, layout: Layout, slo: Slo) -> float:
        """The simulated knee in requests a second (see the function `knee`)."""
        first_guess = capacity(layout, self._traffic.shape, self._workers)
        return knee(first_guess, lambda rate: self._at(layout, rate).goodput_share(slo))

    def _at(self, layout: Layout, rate: float) -> SimulatedPoint:
        key = layout.workers, rate
        if key not in self._points:
            asks = self._traffic.asks(rate, self._requests(rate))
            self._points[key] = simulate(layout, self._workers, asks)
        return self._points[key]

    def _requests(self, rate: float) -> int:
        """As many requests for every layout: enough to fill each one's GPUs."""
        traffic, layouts = self._traffic, self._layouts.values()
        in_sessions = math.ceil(_SESSIONS * traffic.session_s * rate)
        to_fill = (requests_to_fill(layout, traffic.shape, self._workers, rate) for layout in layouts)
        return max(traffic.at_least(_FEWEST_REQUESTS), in_sessions, *to_fill)

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
        ttft, tpot = first_token_factor * self.first_token_ms, token_factor * self.token_ms
        return Slo(ttft=float(f"{ttft:.3g}"), tpot=float(f"{tpot:.3g}"))


def is_separate(layout: str) -> bool:
    """Whether prefill and decode have workers of their own."""
    return not layout.endswith(" agg")


def compare_layouts(
    engines: Engines,
    counts: Sequence[int],
    workloads: Sequence[Traffic],
    slo: Slo,
    rates: Sequence[float] = (),
    by_limits: bool = False,
) -> list[LayoutComparison]:
    """One comparison for each workload and number of workers, at `rates`, or at shares of the best layout's; with
    `by_limits` also under other limits, which takes ten times as long. Raises ConfigError for what no table covers.
    """
    workers = engines.workers()
    return [
        _compare(engines, count, traffic, workers, slo, rates, by_limits)
        for traffic in workloads
        for count in counts
    ]


def _compare(
    engines: Engines,
    count: int,
    traffic: Traffic,
    workers: Mapping[str, ModelledWorker],
    slo: Slo,
    rates: Sequence[float],
    by_limits: bool,
) -> LayoutComparison:
    layouts = one_of_each(count, engines.gpus_per_worker)
    simulated = LayoutSimulation(layouts, traffic, workers)
    factors = product(FIRST_TOKEN_FACTORS, TOKEN_FACTORS) if by_limits else ()
    limits = [simulated.slo(first, token) for first, token in factors]
    return LayoutComparison(
        model=engines.model_name,
        gpu=engines.gpu,
        gpus=layouts[0].gpus,
        gpus_per_worker=engines.gpus_per_worker,
        workload=traffic.name,
        description=f"{traffic.name}: {traffic.description}",
        slo=slo,
        ttft_alone=simulated.first_token_ms,
        tpot_alone=simulated.token_ms,
        layouts=simulated.results(slo, rates or [share * simulated.best_knee(slo) for share in SHARES]),
        by_limits=tuple(
            LeadUnderLimits(each.limits["ttft"], each.limits["tpot"], simulated.lead(each)) for each in limits
        ),
    )
