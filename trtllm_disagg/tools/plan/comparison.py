"""Which layout of a number of workers keeps an SLO up to the highest rate, in which order, and why. An event simulation
on the tables (fleet.py) takes seconds and starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.plan.fleet import simulate
from trtllm_disagg.tools.plan.layouts import PLANNED, Layout, chosen_layouts, layouts_of
from trtllm_disagg.tools.plan.modelled_gpus import Engines
from trtllm_disagg.tools.plan.simulation import (
    PRECISE,
    ModelledWorker,
    SimulatedPoint,
    capacity,
    knee,
    requests_to_fill,
)
from trtllm_disagg.tools.plan.slo import ENOUGH_IN_TIME, Slo
from trtllm_disagg.tools.plan.workloads import Ask, Traffic

#: Without --rates: shares of the rate up to which the best layout keeps the limits.
SHARES = (0.25, 0.5, 0.75, 1.0, 1.1)
#: Layouts within this factor count as alike: the simulation is not more precise.
ALIKE = 1.1
_ALIKE = f"less than {ALIKE - 1:.0%} apart, which the simulation cannot tell"
#: With a hundred, one series of random arrivals moves the rate by a third, with four hundred by a tenth.
_FEWEST_REQUESTS = 400
#: The shortest point, in conversations: then only one request in twelve continues a conversation that was under way at
#: the beginning and is in no cache.
_SESSIONS = 1.5


@dataclass(frozen=True, slots=True)
class AtRate:
    """One layout at a rate in requests/s. Times in milliseconds, medians."""

    rate: float
    ttft: float
    tpot: float
    #: The share of the rate that is answered within the limits.
    in_time: float
    #: Of a request, on average: prompt tokens that are computed, and tokens of which KV is moved.
    computed: float
    moved: float
    #: The share of the requests that the worker answers alone that got them from the frontend.
    alone: float

    @property
    def times(self) -> str:
        # A queue grows as long as the simulation lasts.
        ttft = f"{self.ttft:.0f}" if self.ttft < 10_000 else ">10 s"
        return f"{ttft} / {self.tpot:.3g}"

    @property
    def keeps_limits(self) -> bool:
        return self.in_time >= ENOUGH_IN_TIME


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """One layout under the SLO. Rates in requests/s; times in milliseconds, medians at that rate."""

    #: For `up`: the strategy, and --prefill-decider.
    strategy: str
    decider: str
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
    #: The best layout of each order, by its name.
    layouts: dict[str, LayoutResult]
    #: The best layout of separate workers and the best one with the other role as first stage, at the former's rate.
    orders: dict[str, AtRate]

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
            return f"{self.subject}: run {best} or {other}, {up_to}: {_ALIKE}{self._order()}"
        keeps = "keeps" if is_separate(other) else "keep"
        behind = f"up to {_rounded(rates[other])}" if rates[other] else "at no rate"
        return f"{self.subject}: run {best} {up_to}; {other} {keeps} the limits {behind}{self._order()}"

    def _order(self) -> str:
        """Which order suits this traffic, and why."""
        if not self.orders:
            return ""
        (best, own), (other, others) = self.orders.items()
        if self.layouts[best].rate < ALIKE * self.layouts[other].rate:
            computed = f"{own.computed:.0f} and {others.computed:.0f} prompt tokens computed a request"
            moved = f"{own.moved:.0f} and {others.moved:.0f} moved"
            return f". The order: {best} or {other}, {_ALIKE} ({computed}, {moved})"
        return (
            f". The order: {best}, because {_because(own, others)}: at {_rounded(own.rate)} requests/s it has TTFT / "
            f"TPOT {own.times} ms, and {other} {others.times} (up to {_rounded(self.layouts[other].rate)})"
        )


def _because(own: AtRate, other: AtRate) -> str:
    """What one order saves, and the other one does."""
    saves = []
    if other.computed > ALIKE * own.computed:
        saves.append(
            f"it computes {own.computed:.0f} prompt tokens a request instead of {other.computed:.0f}"
        )
    if other.moved > ALIKE * own.moved:
        saves.append(f"it moves the KV of {own.moved:.0f} instead of {other.moved:.0f}")
    if own.alone > other.alone + ALIKE - 1:
        saves.append(f"its decode workers prefill {own.alone:.0%} of the requests themselves")
    if other.alone > own.alone + ALIKE - 1:
        others = f"{other.alone:.0%} of the requests in the other order"
        saves.append(f"its decode steps wait for no prompts, which they do for {others}")
    *first, last = saves or ["its prompts or its tokens wait less"]
    return f"{', '.join(first)}, and {last}" if first else last


def _rounded(rate: float) -> str:
    """With two digits: the simulation finds a rate to 5 %."""
    return f"{float(f'{rate:.2g}'):g}"


class LayoutSimulation:
    """Simulates the layouts of the same number of GPUs under one workload."""

    def __init__(
        self, layouts: Sequence[Layout], traffic: Traffic, workers: Mapping[str, ModelledWorker]
    ) -> None:
        """`workers` by role."""
        self._layouts = {layout.name: layout for layout in layouts}
        self._traffic, self._workers = traffic, workers
        self._points: dict[tuple[str, float, Slo | None], SimulatedPoint] = {}
        self._asks: dict[float, tuple[Ask, ...]] = {}
        self._best_of: dict[Slo, list[Layout]] = {}
        self._knees: dict[tuple[str, Slo], float] = {}
        #: By number of workers of each role.
        self._last_knees: dict[str, float] = {}
        #: TTFT and TPOT of a lone request.
        self.first_token_ms = 1000 * min(each.prefill_seconds(traffic.shape) for each in workers.values())
        self.token_ms = 1000 * min(each.token_seconds(traffic.shape, 1) for each in workers.values())

    def results(self, slo: Slo, rates: Sequence[float] = ()) -> dict[str, LayoutResult]:
        """Of the best layout of each order, by its name, at `rates` too."""
        return {each.name: self._result(each, slo, rates) for each in self._best(slo)}

    def _best(self, slo: Slo) -> list[Layout]:
        """The best layout of each order."""
        if slo not in self._best_of:
            groups: dict[tuple[str, str], list[Layout]] = {}
            for layout in self._layouts.values():
                groups.setdefault((layout.strategy, layout.decider), []).append(layout)
            best: list[Layout] = []
            for group in groups.values():
                best.append(self._best_in(group, best[-1].workers if best else "", slo))
            self._best_of[slo] = best
        return self._best_of[slo]

    def _best_in(self, group: Sequence[Layout], first_guess: str, slo: Slo) -> Layout:
        """Most others are no better than a good guess, which one simulated point shows."""

        def rank(layout: Layout) -> tuple[bool, float]:
            return layout.workers == first_guess, capacity(layout, self._traffic.shape, self._workers)

        best, *others = sorted(group, key=rank, reverse=True)
        for other in others:
            if self._share(other, self.knee(best, slo), slo) >= ENOUGH_IN_TIME:
                best = max(best, other, key=lambda each: self.knee(each, slo))
        return best

    def _result(self, layout: Layout, slo: Slo, rates: Sequence[float]) -> LayoutResult:
        at = tuple(self._times(layout, rate, slo) for rate in rates)
        most = self._times(layout, self.knee(layout, slo), slo)
        if not most.keeps_limits:
            return LayoutResult(layout.strategy, layout.decider, 0.0, 0.0, 0.0, 0.0, at)
        tokens = most.rate * self._traffic.shape.output_tokens / layout.gpus
        times = most.rate, most.ttft, most.tpot
        return LayoutResult(layout.strategy, layout.decider, *times, tokens, at)

    def _times(self, layout: Layout, rate: float, slo: Slo) -> AtRate:
        point = self._at(layout, rate)
        ttft, tpot = (1000 * median(point.times[name]) for name in ("ttft", "tpot"))
        in_time = point.goodput_share(slo)
        return AtRate(rate, ttft, tpot, in_time, point.computed, point.moved, point.by_one_worker)

    def orders(self, slo: Slo) -> dict[str, AtRate]:
        """The best layout of separate workers and the best one with the other role as first stage, at the former's
        rate; empty where no layout keeps the SLO.
        """
        separate = [each for each in self._best(slo) if not each.agg_workers]
        best, *others = sorted(separate, key=lambda each: -self.knee(each, slo))
        role, rate = spec_of(best.strategy).entry_role, self.knee(best, slo)
        other = next((each for each in others if spec_of(each.strategy).entry_role != role), best)
        at = {each.name: self._times(each, rate, slo) for each in (best, other)}
        return at if at[best.name].keeps_limits else {}

    def best_knee(self, slo: Slo) -> float:
        return max(self.knee(layout, slo) for layout in self._best(slo))

    def knee(self, layout: Layout, slo: Slo) -> float:
        """The simulated knee in requests a second (see the function `knee`)."""
        if (layout.name, slo) not in self._knees:
            # Another order is nearer than an estimate.
            ratio, estimate = layout.workers, capacity(layout, self._traffic.shape, self._workers)
            # On one grid, so that layouts get the same requests.
            guess = self._last_knees.get(ratio) or 2 ** (round(PRECISE * math.log2(estimate)) / PRECISE)
            found = knee(guess, lambda rate: self._share(layout, rate, slo))
            self._knees[layout.name, slo] = self._last_knees[ratio] = found
        return self._knees[layout.name, slo]

    def _share(self, layout: Layout, rate: float, slo: Slo) -> float:
        """Of the requests, those in time; 0 where these are too few."""
        return self._at(layout, rate, slo).goodput_share(slo)

    def _at(self, layout: Layout, rate: float, slo: Slo | None = None) -> SimulatedPoint:
        """With `slo` perhaps not the whole point."""
        known = self._points.get((layout.name, rate, None)) or self._points.get((layout.name, rate, slo))
        if known is None:
            if rate not in self._asks:
                self._asks[rate] = self._traffic.asks(rate, self._requests(rate))
            known = simulate(layout, self._workers, self._asks[rate], slo)
            self._points[layout.name, rate, None if known.is_whole else slo] = known
        return known

    def _requests(self, rate: float) -> int:
        """As many requests for every layout: enough to fill each one's GPUs."""
        traffic, layouts = self._traffic, self._layouts.values()
        in_sessions = math.ceil(_SESSIONS * traffic.session_s * rate)
        to_fill = (requests_to_fill(layout, traffic.shape, self._workers, rate) for layout in layouts)
        return max(traffic.at_least(_FEWEST_REQUESTS), in_sessions, *to_fill)


def is_separate(layout: str) -> bool:
    """Whether prefill and decode have workers of their own."""
    return not layout.endswith(" agg")


def compare_layouts(
    engines: Engines,
    counts: Sequence[int],
    workloads: Sequence[Traffic],
    slo: Slo,
    rates: Sequence[float] = (),
) -> list[LayoutComparison]:
    """One comparison for each workload and number of workers, at `rates`, or at shares of the best layout's. Raises
    ConfigError for what no table covers.
    """
    workers = engines.workers()
    return [
        _compare(engines, count, traffic, workers, slo, rates) for traffic in workloads for count in counts
    ]


def _compare(
    engines: Engines,
    count: int,
    traffic: Traffic,
    workers: Mapping[str, ModelledWorker],
    slo: Slo,
    rates: Sequence[float],
) -> LayoutComparison:
    layouts = chosen_layouts(layouts_of(count, engines.gpus_per_worker), PLANNED)
    simulated = LayoutSimulation(layouts, traffic, workers)
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
        orders=simulated.orders(slo),
    )
