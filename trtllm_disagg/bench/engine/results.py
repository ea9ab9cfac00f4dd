"""All that one run of `bench engine` measures, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from trtllm_disagg.bench.engine import overheads, scaling, speed
from trtllm_disagg.bench.engine.plan import Plan
from trtllm_disagg.bench.figures import Figure
from trtllm_disagg.bench.models import SIZES
from trtllm_disagg.bench.plot import Panel
from trtllm_disagg.bench.report import Say, figures_table
from trtllm_disagg.embedded.cpu import this_cpu


@dataclass(slots=True)
class Results:
    plan: Plan
    speeds: list[speed.Speeds] = field(default_factory=list)
    overheads: list[overheads.Overheads] = field(default_factory=list)
    #: Seconds that the LLM API adds.
    added_ttft: list[float] = field(default_factory=list)
    scalings: list[scaling.Scaling] = field(default_factory=list)
    #: False for a run that is too short to be held to a target.
    is_judged: bool = True

    @property
    def groups(self) -> dict[str, list[Figure]]:
        """Figures by the title of their table."""
        return {
            "Speed": [figure for found in self.speeds for figure in speed.figures_of(found)],
            **{
                f"Beside the model, {found.name}, one thread": overheads.figures_of(found)
                for found in self.overheads
            },
            "The LLM API": [overheads.added_ttft_figure(seconds) for seconds in self.added_ttft],
            **{f"Growth, {grown.name}, one thread": scaling.figures_of(grown) for grown in self.scalings},
        }

    @property
    def figures(self) -> list[Figure]:
        figures = [figure for group in self.groups.values() for figure in group]
        return figures if self.is_judged else [figure.unjudged() for figure in figures]

    @property
    def panels(self) -> list[Panel]:
        return [*speed.panels_of(self.speeds), *(p for s in self.scalings for p in scaling.panels_of(s))]

    def print_tables(self, console: Console) -> None:
        """Tables of speeds, and of what has no target; the targets come last."""
        plan = self.plan
        console.print(
            f"CPU level {this_cpu()}. Prompts of {plan.prompt_tokens} tokens, decode at context {plan.context}, "
            f"{plan.rounds} rounds; medians, ratios in pairs.\n"
        )
        for speeds in self.speeds:
            speed.print_speeds(console, speeds)
        for title, figures in self.groups.items():
            untold = [figure for figure in figures if not (self.is_judged and figure.target)]
            if untold and title != "Speed":
                console.print(figures_table(title, untold))


def measure(plan: Plan, parts: Sequence[str], peers: Sequence[str], cache: Path, say: Say) -> Results:
    """`scaling` is a matter of the smallest model, where everything beside the model weighs most."""
    results = Results(plan)
    kinds = [(SIZES[size], dtype) for size in plan.sizes for dtype in plan.dtypes]
    if "speed" in parts:
        results.speeds = [
            speed.measure_speeds(plan, *kind, threads, peers, cache, say)
            for kind in kinds
            for threads in plan.threads
        ]
    if "overheads" in parts:
        results.overheads = [overheads.measure_overheads(plan, *kind, cache, say) for kind in kinds]
        results.added_ttft = [overheads.measure_added_ttft(plan, cache, say)]
    if "scaling" in parts:
        size, dtype = kinds[0][0], kinds[-1][1]
        results.scalings = [scaling.measure_scaling(plan, size, dtype, cache, say)]
    return results
