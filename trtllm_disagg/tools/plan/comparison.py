"""Finds the layout and order that keep an SLO up to the highest rate, and the reason. Simulates (fleet.py) for seconds,
and starts nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.plan.fleet import simulate
from trtllm_disagg.tools.plan.layouts import Layout, planned_layouts
from trtllm_disagg.tools.plan.modelled_gpus import Division
from trtllm_disagg.tools.plan.simulation import PRECISE, SimulatedPoint, capacity, knee, requests_to_fill
from trtllm_disagg.tools.plan.slo import ENOUGH_IN_TIME, Slo
from trtllm_disagg.tools.plan.workloads import Ask, Traffic

#: Rates to show without --rates, as shares of the best layout's highest rate within the limits.
SHARES = (0.25, 0.5, 0.75, 1.0, 1.1)
#: Layouts within this factor count as alike; the simulation is no more precise.
ALIKE = 1.1
_ALIKE = f"less than {ALIKE - 1:.0%} apart, too little for the simulation to separate"
#: Over five random series, rates vary by 17 % with 400 requests and by 2 % with 800.
_FEWEST_REQUESTS = 800
#: Min length of a point, in conversations: then at most one request in twelve continues a conversation that began
#: before the point and is in no cache.
_SESSIONS = 1.5
#: Layouts per comparison that are simulated at the shown rates.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class AtRate:
    """One layout at one rate in requests/s. Median times in milliseconds."""

    rate: float
    ttft: float
    tpot: float
    #: Share of the rate answered within the limits.
    in_time: float
    #: Per request, on average: computed prompt tokens, and tokens of moved KV.
    computed: float
    moved: float
    #: Share of the requests that one worker answered alone.
    alone: float

    @property
    def times(self) -> str:
        # The queue grows for as long as the simulation runs.
        ttft = f"{self.ttft:.0f}" if self.ttft < 10_000 else ">10 s"
        return f"{ttft} / {self.tpot:.3g}"

    @property
    def keeps_limits(self) -> bool:
        return self.in_time >= ENOUGH_IN_TIME


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """One layout under the SLO. Rates in requests/s; median times in milliseconds, at that rate."""

    #: Strategy and --prefill-decider, for `up`.
    strategy: str
    decider: str
    gpus_per_worker: int
    #: Highest rate with nearly all answers in time; 0 for none.
    rate: float
    ttft: float
    tpot: float
    tokens_s_gpu: float
    #: At the same rates for all layouts.
    at: tuple[AtRate, ...] = ()

    @property
    def is_separate(self) -> bool:
        """Prefill and decode run on separate workers."""
        return spec_of(self.strategy).is_disaggregated


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """The result for one workload and number of GPUs."""

    #: "llama-3.1-8b" and "H100"; "GPU" if the name is unknown.
    model: str
    gpu: str
    gpus: int
    workload: str
    #: The workload and its mean lengths.
    description: str
    slo: Slo
    #: TTFT and TPOT of a lone request, with the best layout's worker size.
    ttft_alone: float
    tpot_alone: float
    #: Name -> the best layout of each order and worker size.
    layouts: dict[str, LayoutResult]
    #: The best layout with separate workers and the best one with the other first stage, at the former's rate.
    orders: dict[str, AtRate]

    @property
    def best(self) -> str:
        return max(self.layouts, key=self._rate)

    @property
    def highest(self) -> float:
        return self._rate(self.best)

    def _rate(self, name: str) -> float:
        return self.layouts[name].rate

    @property
    def subject(self) -> str:
        sizes = {each.gpus_per_worker for each in self.layouts.values()}
        each = f", {max(sizes)} a worker" if len(sizes) == 1 and max(sizes) > 1 else ""
        return f"{self.gpus} {self.gpu}s{each} ({self.model}; {self.description}; {self.slo})"

    def sentence(self) -> str:
        """The layout to run, its highest rate, and the best alternative."""
        best, rate = self.best, self.highest
        kind = self.layouts[best].is_separate
        others = [name for name, each in self.layouts.items() if each.is_separate is not kind]
        other = max(others, key=self._rate, default=best)
        if not rate:
            alone = f"a lone request has TTFT {self.ttft_alone:.3g} ms and TPOT {self.tpot_alone:.3g} ms"
            return f"{self.subject}: no layout keeps the limits at any rate; {alone}"
        if other == best:
            return (
                f"{self.subject}: run {best} up to {_rounded(rate)} requests/s; no other kind of layout fits"
            )
        if rate < ALIKE * self._rate(other):
            up_to = f"up to {_rounded(rate)} and {_rounded(self._rate(other))} requests/s"
            return f"{self.subject}: run {best} or {other}, {up_to}: {_ALIKE}{self._order()}"
        keeps = "keep" if kind else "keeps"
        behind = f"up to {_rounded(self._rate(other))}" if self._rate(other) else "at no rate"
        up_to = f"up to {_rounded(rate)} requests/s"
        return f"{self.subject}: run {best} {up_to}; {other} {keeps} the limits {behind}{self._order()}"

    def _order(self) -> str:
        """The order that suits this traffic, and why."""
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
    """What one order saves compared to the other."""
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
        saves.append(f"its decode steps do not wait for prompts, as they do for {others}")
    *first, last = saves or ["its prompts or tokens wait less"]
    return f"{', '.join(first)}, and {last}" if first else last


def _rounded(rate: float) -> str:
    """Two digits, since the simulation finds rates to 5 %."""
    return f"{float(f'{rate:.2g}'):g}"


class LayoutSimulation:
    """Simulates the layouts of GPUs that are divided into workers of one size, under one workload and SLO."""

    def __init__(self, division: Division, traffic: Traffic, slo: Slo, *, names_size: bool = False) -> None:
        """`names_size`: the layouts' names have the worker size."""
        size, workers = division.engines.gpus_per_worker, division.workers
        layouts = planned_layouts(division.gpus // size, size)
        if names_size:
            layouts = tuple(replace(each, name=f"{each.name} TP{size}") for each in layouts)
        self._layouts = {layout.name: layout for layout in layouts}
        self._division, self._traffic, self._workers, self._slo = division, traffic, workers, slo
        self._points: dict[tuple[str, float], SimulatedPoint] = {}
        self._asks: dict[float, tuple[Ask, ...]] = {}
        self._knees: dict[str, float] = {}
        #: Ratio of workers, such as "1P3D" -> knee.
        self._last_knees: dict[str, float] = {}
        self.first_token_ms = 1000 * min(each.prefill_seconds(traffic.shape) for each in workers.values())
        self.token_ms = 1000 * min(each.token_seconds(traffic.shape, 1) for each in workers.values())

    def found(self) -> _Found:
        best = {each.name: self._result(each) for each in self._best}
        return _Found(best, self._orders(), max(map(self._knee, self._best)))

    def comparison(self, found: Sequence[_Found]) -> LayoutComparison:
        """Combines all worker sizes; takes the order from the size that suits separate workers best."""
        engines, traffic = self._division.engines, self._traffic
        return LayoutComparison(
            model=engines.model_name,
            gpu=engines.gpu,
            gpus=self._division.gpus,
            workload=traffic.name,
            description=f"{traffic.name}: {traffic.description}",
            slo=self._slo,
            ttft_alone=self.first_token_ms,
            tpot_alone=self.token_ms,
            layouts={name: result for each in found for name, result in each.layouts.items()},
            orders=max(found, key=lambda each: each.highest(is_separate_only=True)).orders,
        )

    def at(self, name: str, rates: Sequence[float]) -> tuple[AtRate, ...]:
        return tuple(self._times(self._layouts[name], rate) for rate in rates)

    @cached_property
    def _best(self) -> list[Layout]:
        """The best layout of each order."""
        groups: dict[tuple[str, str], list[Layout]] = {}
        for layout in self._layouts.values():
            groups.setdefault((layout.strategy, layout.decider), []).append(layout)
        best: list[Layout] = []
        for group in groups.values():
            best.append(self._best_in(group, best[-1].workers if best else ""))
        return best

    def _best_in(self, group: Sequence[Layout], first_guess: str) -> Layout:
        """Simulates one point per layout: most are no better than a good guess."""

        def rank(layout: Layout) -> tuple[bool, float]:
            return layout.workers == first_guess, capacity(layout, self._traffic.shape, self._workers)

        best, *others = sorted(group, key=rank, reverse=True)
        for other in others:
            if self._share(other, self._knee(best)) >= ENOUGH_IN_TIME:
                best = max(best, other, key=self._knee)
        return best

    def _result(self, layout: Layout) -> LayoutResult:
        peak = self._times(layout, self._knee(layout))
        of = layout.strategy, layout.decider, layout.gpus_per_worker
        if not peak.keeps_limits:
            return LayoutResult(*of, 0.0, 0.0, 0.0, 0.0)
        tokens = peak.rate * self._traffic.shape.output_tokens / layout.gpus
        return LayoutResult(*of, peak.rate, peak.ttft, peak.tpot, tokens)

    def _times(self, layout: Layout, rate: float) -> AtRate:
        point = self._at(layout, rate, is_whole=True)
        ttft, tpot = (1000 * median(point.times[name]) for name in ("ttft", "tpot"))
        in_time = point.goodput_share(self._slo)
        return AtRate(rate, ttft, tpot, in_time, point.computed, point.moved, point.by_one_worker)

    def _orders(self) -> dict[str, AtRate]:
        """The best layout with separate workers and the best one with the other first stage, at the former's rate.
        Empty if no layout keeps the SLO.
        """
        separate = sorted((each for each in self._best if not each.agg_workers), key=self._knee, reverse=True)
        if not separate:
            return {}
        best, *others = separate
        role, rate = spec_of(best.strategy).entry_role, self._knee(best)
        other = next((each for each in others if spec_of(each.strategy).entry_role != role), best)
        at = {each.name: self._times(each, rate) for each in (best, other)}
        return at if at[best.name].keeps_limits else {}

    def _knee(self, layout: Layout) -> float:
        """The simulated knee in requests per second (see `knee`)."""
        if layout.name not in self._knees:
            # Another order's knee is a better guess than the estimate.
            ratio, estimate = layout.workers, capacity(layout, self._traffic.shape, self._workers)
            # Guesses lie on one grid, so that layouts share simulated requests.
            guess = self._last_knees.get(ratio) or 2 ** (round(PRECISE * math.log2(estimate)) / PRECISE)
            found = knee(guess, lambda rate: self._share(layout, rate))
            self._knees[layout.name] = self._last_knees[ratio] = found
        return self._knees[layout.name]

    def _share(self, layout: Layout, rate: float) -> float:
        """The share of requests in time; 0 if too few are."""
        return self._at(layout, rate).goodput_share(self._slo)

    def _at(self, layout: Layout, rate: float, *, is_whole: bool = False) -> SimulatedPoint:
        """Stops when too many requests are late, unless `is_whole`."""
        known = self._points.get((layout.name, rate))
        if known is None or (is_whole and not known.is_whole):
            if rate not in self._asks:
                self._asks[rate] = self._traffic.asks(rate, self._requests(rate))
            known = simulate(layout, self._workers, self._asks[rate], None if is_whole else self._slo)
            self._points[layout.name, rate] = known
        return known

    def _requests(self, rate: float) -> int:
        """Enough requests to fill the GPUs of every layout."""
        traffic, layouts = self._traffic, self._layouts.values()
        in_sessions = math.ceil(_SESSIONS * traffic.session_s * rate)
        to_fill = (requests_to_fill(layout, traffic.shape, self._workers, rate) for layout in layouts)
        return max(traffic.at_least(_FEWEST_REQUESTS), in_sessions, *to_fill)


class _Found(NamedTuple):
    """The result for one worker size; `knee`: of the best layout."""

    layouts: dict[str, LayoutResult]
    orders: dict[str, AtRate]
    knee: float

    def highest(self, *, is_separate_only: bool = False) -> float:
        rates = (each.rate for each in self.layouts.values() if each.is_separate or not is_separate_only)
        return max(rates, default=0.0)


def compare_layouts(
    divisions: Sequence[Division],
    workloads: Sequence[Traffic],
    slo: Slo,
    rates: Sequence[float] = (),
    report: Callable[[float], None] = lambda share_done: None,
) -> list[LayoutComparison]:
    """Compares the layouts per workload and number of GPUs, on all cores. The best layout and those of its worker size
    are also simulated at `rates` (default: SHARES of the best). Raises ConfigError for a workload that fits no KV pool.
    """
    totals = dict.fromkeys(each.gpus for each in divisions)
    names_size = len(divisions) > len(totals)
    groups = [
        [
            LayoutSimulation(each, traffic, slo, names_size=names_size)
            for each in _fitting(divisions, gpus, traffic)
        ]
        for traffic, gpus in itertools.product(workloads, totals)
    ]
    _simulations[:] = itertools.chain(*groups)
    steps, expected = itertools.count(1), len(_simulations) + _SHOWN * len(groups)
    # Forked, because the tables cannot be sent to the processes.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork"), _die_with_parent) as pool:

        def submit(simulation: LayoutSimulation, method: str, *args: object) -> Future[Any]:
            future = pool.submit(_call, _simulations.index(simulation), method, *args)
            future.add_done_callback(lambda _: report(min(1.0, next(steps) / expected)))
            return future

        finding = {each: submit(each, "found") for each in _simulations}
        compared, shown = list[LayoutComparison](), list[dict[str, Future[tuple[AtRate, ...]]]]()
        for group in groups:
            found: dict[LayoutSimulation, _Found] = {each: finding[each].result() for each in group}
            best = max(group, key=lambda each: found[each].highest())
            compared.append(best.comparison([*found.values()]))
            at = rates or [share * found[best].knee for share in SHARES]
            shown.append({name: submit(best, "at", name, at) for name in found[best].layouts})
        return [
            replace(
                each, layouts={name: _with(result, at.get(name)) for name, result in each.layouts.items()}
            )
            for each, at in zip(compared, shown, strict=True)
        ]


def _with(result: LayoutResult, at: Future[tuple[AtRate, ...]] | None) -> LayoutResult:
    return result if at is None else replace(result, at=at.result())


def _fitting(divisions: Sequence[Division], gpus: int, traffic: Traffic) -> list[Division]:
    """The divisions with KV pools that hold every request."""
    same = [each for each in divisions if each.gpus == gpus]
    pool = max(each.smallest_pool for each in same)
    if pool < traffic.longest:
        allowed = f"requests of at most {pool} tokens, the KV pool; this one has up to {traffic.longest}"
        raise ConfigError.bad_value("--workloads", traffic.name, allowed)
    return [each for each in same if each.smallest_pool >= traffic.longest]


#: The forked processes of `compare_layouts` read this.
_simulations: list[LayoutSimulation] = []


def _call(number: int, method: str, *args: object) -> object:
    return getattr(_simulations[number], method)(*args)


def _die_with_parent() -> None:
    """An idle pool process would not notice that its parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
