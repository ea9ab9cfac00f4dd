"""`bench strategies --foresee`: which layout of the same number of workers should keep an SLO up to the highest rate,
and under which SLOs another one would. It takes seconds: an event simulation on the tables (simulation.py), which
starts nothing. Our own software takes no time in it, so orders, which differ in software only, are alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtllm_disagg.tools.bench.figures import Column, Grid, rounded
from trtllm_disagg.tools.bench.strategies.arms import arms_at, worker_counts
from trtllm_disagg.tools.bench.strategies.measures import Slo
from trtllm_disagg.tools.bench.strategies.planning import Engines, slo_of, traffics
from trtllm_disagg.tools.bench.strategies.records import Arm
from trtllm_disagg.tools.bench.strategies.simulation import ArmSimulations, ModelledWorker
from trtllm_disagg.tools.bench.strategies.sweep import ENOUGH_IN_TIME
from trtllm_disagg.tools.bench.strategies.workloads import Shape, Traffic

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
class Limited:
    """The lead under limits in milliseconds; None: no layout keeps them."""

    ttft: float
    tpot: float
    lead: LayoutLead | None


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """The result for one workload on a number of GPUs, in milliseconds and requests a second."""

    workload: str
    gpus: int
    slo: Slo
    #: Mean tokens of an answer.
    output_tokens: float
    #: TTFT and TPOT of a lone request.
    ttft_alone: float
    tpot_alone: float
    #: By layout, the highest rate at which nearly all answers are in time; 0 if there is none.
    rates: dict[str, float]
    by_limits: tuple[Limited, ...]


class LayoutSimulation:
    """Simulates the layouts of the same number of GPUs under one workload."""

    def __init__(self, arms: Sequence[Arm], traffic: Traffic, workers: Mapping[str, ModelledWorker]) -> None:
        """`arms`: one of each layout."""
        self._simulations = ArmSimulations(arms, traffic, workers, _FEWEST_REQUESTS)
        shape = traffic.shape
        #: TTFT and TPOT of a lone request.
        self.first_token_ms = 1000 * min(worker.prefill_seconds(shape) for worker in workers.values())
        self.token_ms = 1000 * min(_token_seconds(worker, shape) for worker in workers.values())

    def rates(self, slo: Slo) -> dict[str, float]:
        """By layout, the highest requests a second at which nearly all answers are in time; 0 if there is none."""
        found = {}
        for arm in self._simulations.arms:
            rate = self._simulations.knee(arm, slo)
            keeps = self._simulations.at(arm, rate).goodput_share(slo) >= ENOUGH_IN_TIME
            found[layout_of(arm)] = rate if keeps else 0.0
        return found

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
            ttft=rounded(first_token_factor * self.first_token_ms, 3),
            tpot=rounded(token_factor * self.token_ms, 3),
        )


def _token_seconds(worker: ModelledWorker, shape: Shape) -> float:
    rest = worker.isolated_seconds(shape) - worker.prefill_seconds(shape)
    return rest / max(1.0, shape.output_tokens)


def is_separate(layout: str) -> bool:
    """Whether prefill and decode have workers of their own."""
    return not layout.endswith(" agg")


def layout_of(arm: Arm) -> str:
    return arm.name if arm.agg_workers else arm.name.partition(" ")[0]


def layouts(workers: int, gpus_per_worker: int) -> tuple[Arm, ...]:
    """One arm of each layout."""
    arms = {layout_of(arm): arm for arm in reversed(arms_at(workers, gpus_per_worker))}
    return tuple(reversed(arms.values()))


def compare_layouts(args: argparse.Namespace) -> list[LayoutComparison]:
    """One comparison for each workload and number of workers. Raises ConfigError, also for what no table covers."""
    counts = worker_counts(args)
    engines = Engines.read(
        args.engine, args.model, args.engine_configs, layouts(max(counts), 1), args.override_engine_args
    )
    workers, slo = engines.workers(), slo_of(args)
    return [
        _comparison(layouts(count, engines.gpus_per_worker), traffic, workers, slo)
        for traffic in traffics(args, engines.longest).values()
        for count in counts
    ]


def _comparison(
    arms: Sequence[Arm], traffic: Traffic, workers: Mapping[str, ModelledWorker], slo: Slo
) -> LayoutComparison:
    simulated = LayoutSimulation(arms, traffic, workers)
    limits = [simulated.slo(first, token) for first in FIRST_TOKEN_FACTORS for token in TOKEN_FACTORS]
    return LayoutComparison(
        workload=traffic.record.name,
        gpus=arms[0].gpus,
        slo=slo,
        output_tokens=traffic.shape.output_tokens,
        ttft_alone=simulated.first_token_ms,
        tpot_alone=simulated.token_ms,
        rates=simulated.rates(slo),
        by_limits=tuple(
            Limited(each.limits["ttft"], each.limits["tpot"], simulated.lead(each)) for each in limits
        ),
    )


def grids(compared: LayoutComparison) -> tuple[Grid, Grid]:
    """The comparison as tables."""
    return _at_slo(compared), _by_limits(compared)


def _at_slo(compared: LayoutComparison) -> Grid:
    rows = {
        (layout,): {"rate": rate, "tokens": rate * compared.output_tokens / compared.gpus}
        for layout, rate in compared.rates.items()
    }
    columns = (
        Column("rate", form=".3g", header="requests/s"),
        Column("tokens", form=".0f", header="tok/s/GPU"),
    )
    title = f"{compared.workload} on {compared.gpus} GPUs: the rate up to which {compared.slo} are kept"
    return Grid(title, ("layout",), columns, rows, "")


def _by_limits(compared: LayoutComparison) -> Grid:
    rows: dict[tuple[str], dict[str, str]] = {}
    for each in compared.by_limits:
        rows.setdefault((f"TTFT {each.ttft:g} ms",), {})[f"{each.tpot:g}"] = str(each.lead or "none")
    columns = [
        Column(tpot, header=f"TPOT\n{tpot} ms\n{factor:g}x")
        for tpot, factor in zip(next(iter(rows.values())), TOKEN_FACTORS, strict=True)
    ]
    title = (
        f"{compared.workload} on {compared.gpus} GPUs: the best layout by limits, and its lead over the other kind. "
        f"A request that is alone has TTFT {compared.ttft_alone:.3g} ms and TPOT {compared.tpot_alone:.3g} ms"
    )
    return Grid(title, ("",), columns, rows, "")
