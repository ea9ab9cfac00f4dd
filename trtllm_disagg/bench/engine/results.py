"""All that one run of `bench engine` measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtllm_disagg.bench.engine import overheads, scaling, speed
from trtllm_disagg.bench.engine.plan import SIZES, Plan
from trtllm_disagg.bench.engine.rounds import measure_speeds
from trtllm_disagg.bench.figures import Figure


@dataclass(slots=True)
class Results:
    speeds: list[speed.Speeds] = field(default_factory=list)
    overheads: list[overheads.Overheads] = field(default_factory=list)
    #: Seconds that the LLM API adds.
    added_ttft: list[float] = field(default_factory=list)
    scalings: list[scaling.Scaling] = field(default_factory=list)
    #: False for a run that is too short to be held to a target.
    is_judged: bool = True

    @property
    def figures(self) -> list[Figure]:
        figures = [
            *(figure for found in self.speeds for figure in speed.figures_of(found)),
            *(figure for found in self.overheads for figure in overheads.figures_of(found)),
            *(overheads.added_ttft_figure(seconds) for seconds in self.added_ttft),
            *(figure for found in self.scalings for figure in scaling.figures_of(found)),
        ]
        return figures if self.is_judged else [figure.unjudged() for figure in figures]


def measure(
    plan: Plan, parts: Sequence[str], peers: Sequence[str], cache: Path, say: Callable[[str], None]
) -> Results:
    """`scaling` is a matter of the smallest model, where everything beside the model weighs most."""
    results = Results()
    kinds = [(SIZES[size], dtype) for size in plan.sizes for dtype in plan.dtypes]
    if "speed" in parts:
        results.speeds = [
            measure_speeds(plan, size, dtype, threads, peers, cache, say)
            for size, dtype in kinds
            for threads in plan.threads
        ]
    if "overheads" in parts:
        results.overheads = [overheads.measure_overheads(plan, *kind, cache, say) for kind in kinds]
        results.added_ttft = [overheads.measure_added_ttft(plan, cache, say)]
    if "scaling" in parts:
        size, dtype = kinds[0][0], kinds[-1][1]
        results.scalings = [scaling.measure_scaling(plan, size, dtype, cache, say)]
    return results
