"""What `bench engine` prints: tables, each target with met or missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from trtllm_disagg.bench.engine.contestants import EMBEDDED
from trtllm_disagg.bench.engine.plan import Plan
from trtllm_disagg.bench.engine.results import Results
from trtllm_disagg.bench.engine.speed import Speeds
from trtllm_disagg.bench.figures import NOT_JUDGED, Figure, Sample
from trtllm_disagg.bench.machine import describe_machine, load
from trtllm_disagg.bench.progress import wide_console
from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu

_VERDICTS = {True: "ok", False: "missed", None: ""}


def print_report(results: Results, plan: Plan, load_before: float) -> None:
    console = wide_console()
    console.print(
        f"{describe_machine()}, CPU level {this_cpu()}; load {load_before:.1f} before, {load():.1f} after"
    )
    console.print(
        f"Prompts of {plan.prompt_tokens} tokens, decode at context {plan.context}, {plan.rounds} rounds; "
        "medians, ratios in pairs.\n"
    )
    for speeds in results.speeds:
        console.print(_speeds(speeds))
        _remarks(console, speeds)
    for title, figures in _by_table(results):
        console.print(_figures(title, figures))
    missed = [figure for figure in results.figures if figure.missed]
    judged = sum(figure.ok is not None for figure in results.figures)
    console.print(f"{judged - len(missed)} of {judged} targets are met." if judged else NOT_JUDGED)


def _speeds(speeds: Speeds) -> Table:
    table = Table(title=f"{speeds.name}, tokens a second", title_justify="left")
    table.add_column("")
    for name in speeds.contestants:
        table.add_column(name, justify="right")
    for name in ("spread", "best peer", "ratio"):
        table.add_column(name, justify="right")
    for test, rates in speeds.rates.items():
        peer = speeds.best_peer(test)
        table.add_row(
            test,
            *(_cell(speeds, test, name) for name in speeds.contestants if name in rates),
            f"±{speeds.rate(test, EMBEDDED).spread / 2:.0%}",
            peer or "",
            f"{speeds.against(test, peer).median:.2f}x" if peer else "",
        )
    return table


def _cell(speeds: Speeds, test: str, name: str) -> str:
    rate = speeds.rate(test, name).median
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"


def _remarks(console: Console, speeds: Speeds) -> None:
    read, multiply = Sample(tuple(speeds.read)).median, Sample(tuple(speeds.multiply)).median
    console.print(
        f"Hardware: reads {read:.1f} GB/s, multiplies {multiply:.0f} GFLOP/s. "
        f"Waiting for a core: {speeds.waited:.0%} of the time."
    )
    if speeds.is_crowded:
        console.print("No verdict: others needed the cores as well.")
    for peer, (equal, of) in speeds.agreeing.items():
        console.print(f"{peer}: {equal} of {of} greedy answers are the embedded engine's.")
    for peer, reason in speeds.absent.items():
        console.print(f"{peer}: {reason}.")
    console.print()


def _by_table(results: Results) -> Iterable[tuple[str, Sequence[Figure]]]:
    from trtllm_disagg.bench.engine import overheads, scaling, speed

    judged = [figure for found in results.speeds for figure in speed.figures_of(found) if figure.target]
    if judged:
        yield "Speed: targets", judged
    for found in results.overheads:
        yield f"Beside the model, {found.name}, one thread", overheads.figures_of(found)
    if results.added_ttft:
        yield "The LLM API", [overheads.added_ttft_figure(seconds) for seconds in results.added_ttft]
    for grown in results.scalings:
        yield f"Growth, {grown.name}, one thread", scaling.figures_of(grown)


def _figures(title: str, figures: Sequence[Figure]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("target")
    table.add_column("")
    for figure in figures:
        value = float(f"{figure.value:.4g}")
        table.add_row(figure.figure, f"{value:g}", figure.unit, figure.target or "", _VERDICTS[figure.ok])
    return table
