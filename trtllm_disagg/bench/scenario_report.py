"""What `bench scenarios` says: a table a scenario, ratios beside the post's, figures, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from rich.table import Table

from trtllm_disagg.bench.figures import Figure, at_least, at_most, exactly
from trtllm_disagg.bench.machine import describe_machine, load
from trtllm_disagg.bench.plot import plot_bars
from trtllm_disagg.bench.progress import wide_console
from trtllm_disagg.bench.scenarios import Outcome
from trtllm_disagg.bench.servers import MODES
from trtllm_disagg.bench.workloads import SCALES, SEED_RATIOS

#: Header, attribute of Measures, format.
_COLUMNS = (
    ("wall s", "wall", ".3f"),
    ("gen tok/s", "throughput", ".0f"),
    ("TTFT ms", "ttft", ".1f"),
    ("TTFT p99", "ttft_p99", ".1f"),
    ("ITL p99 ms", "itl_p99", ".1f"),
    ("latency ms", "latency", ".1f"),
)
_RATIOS = ("throughput", "ttft", "itl_p99", "latency")
#: The post's strongest scenario: its ratios are to be beaten, at any size.
_TARGET = "long_prompts"


def figures_of(outcomes: Sequence[Outcome]) -> list[Figure]:
    figures = []
    for outcome in outcomes:
        name = f"{outcome.scale} {outcome.scenario.name}"
        for mode in outcome.measures:
            for _, column, _ in _COLUMNS:
                unit = {"wall": "s", "throughput": "tok/s"}.get(column, "ms")
                figures.append(Figure(f"{name} {mode} {column}", outcome.sample(mode, column).median, unit))
        figures += _ratio_figures(outcome, name)
    mismatches = sum(outcome.mismatches for outcome in outcomes)
    return [*figures, exactly("token mismatches", mismatches, "tokens", 0)]


def _ratio_figures(outcome: Outcome, name: str) -> list[Figure]:
    """The targets are for the better one of the disaggregated modes, against each monolithic one."""
    figures = []
    for against in outcome.monolithic if outcome.disaggregated else ():
        for mode in outcome.disaggregated:
            figures += [
                Figure(f"{name} {column} {mode}/{against}", outcome.ratio(mode, against, column), "x")
                for column in _RATIOS
            ]
        if outcome.scenario.name == _TARGET:
            figures += _best_figures(outcome, name, against)
    return figures


def _best_figures(outcome: Outcome, name: str, against: str) -> list[Figure]:
    ratios = [outcome.ratios(mode, against) for mode in outcome.disaggregated]
    seed = SEED_RATIOS[outcome.scenario.name]
    throughput = max(ratio.throughput for ratio in ratios)
    ttft = min(ratio.ttft for ratio in ratios)
    return [
        at_least(f"{name} throughput best disaggregated/{against}", throughput, "x", seed.throughput),
        at_most(f"{name} ttft best disaggregated/{against}", ttft, "x", seed.ttft),
    ]


def print_report(outcomes: Sequence[Outcome], load_before: float) -> None:
    console = wide_console()
    console.print(f"{describe_machine()}; load {load_before:.1f} before, {load():.1f} after")
    for mode in outcomes[0].measures:
        console.print(f"  {mode}: {MODES[mode].help}")
    for scale in dict.fromkeys(outcome.scale for outcome in outcomes):
        of_scale = [outcome for outcome in outcomes if outcome.scale == scale]
        console.print(_results(scale, of_scale))
        if of_scale[0].disaggregated and of_scale[0].monolithic:
            console.print(_ratios(scale, of_scale))
    mismatches = sum(outcome.mismatches for outcome in outcomes)
    console.print(
        f"{mismatches} of {sum(outcome.compared for outcome in outcomes)} tokens differ between modes."
    )
    for figure in figures_of(outcomes):
        if figure.missed:
            console.print(f"missed: {figure.figure} {figure.value:.2f} {figure.unit}, target {figure.target}")


def _results(scale: str, outcomes: Sequence[Outcome]) -> Table:
    chunk, whole = SCALES[scale].chunk, SCALES[scale].whole_prompt
    title = f"Scale {scale}: chunks of {chunk} prompt tokens a step, or {whole} where no prompt is cut"
    table = Table(title=title, title_justify="left")
    table.add_column("scenario", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for header, _, _ in _COLUMNS:
        table.add_column(header, justify="right")
    table.add_column("spread", justify="right")
    for outcome in outcomes:
        rows = zip_longest(outcome.scenario.labels, outcome.measures, fillvalue="")
        for label, mode in rows:
            table.add_row(label, mode, *_cells(outcome, mode))
        table.add_section()
    return table


def _cells(outcome: Outcome, mode: str) -> list[str]:
    if not mode:
        return []
    values = [format(outcome.sample(mode, column).median, form) for _, column, form in _COLUMNS]
    return [*values, f"±{outcome.sample(mode, 'wall').spread / 2:.0%}"]


def _ratios(scale: str, outcomes: Sequence[Outcome]) -> Table:
    table = Table(title=f"Scale {scale}: disaggregated / monolithic, in pairs", title_justify="left")
    table.add_column("scenario")
    table.add_column("against", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for header in ("throughput", "TTFT", "ITL p99", "latency"):
        table.add_column(header, justify="right")
    for outcome in outcomes:
        seed = SEED_RATIOS[outcome.scenario.name]
        post = (f"{seed.throughput:.2f}x", f"{seed.ttft:.2f}x", "", f"{seed.latency:.2f}x")
        table.add_row(outcome.scenario.name, "the post's", "", *post)
        for against in outcome.monolithic:
            for number, mode in enumerate(outcome.disaggregated):
                cells = [f"{outcome.ratio(mode, against, column):.2f}x" for column in _RATIOS]
                table.add_row("", "" if number else against, mode, *cells)
        table.add_section()
    return table


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    titles = {"throughput": "gen tok/s", "ttft": "TTFT ms", "itl_p99": "ITL p99 ms"}
    panels = {
        f"{scale}: {title}": {
            mode: {
                outcome.scenario.name: outcome.sample(mode, column).median
                for outcome in outcomes
                if outcome.scale == scale
            }
            for mode in outcomes[0].measures
        }
        for scale in dict.fromkeys(outcome.scale for outcome in outcomes)
        for column, title in titles.items()
    }
    plot_bars(panels, "Monolithic and disaggregated on the same two cores", path)
