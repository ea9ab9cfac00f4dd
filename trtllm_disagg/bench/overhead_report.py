"""What `bench overhead` says: a table with a row an order, figures with the targets."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from trtllm_disagg.bench.figures import NOT_JUDGED, Figure, at_least, at_most
from trtllm_disagg.bench.machine import describe_machine, load
from trtllm_disagg.bench.overhead import BASELINE, Outcome
from trtllm_disagg.bench.progress import wide_console

#: The worker that a worker-side order sends tokens through a second time.
_RELAYS = {"prefill_first": "prefill"}
_WORKER_SIDE = ("prefill_first", "decode_first")

#: Header, attribute of Round, unit, format.
_COLUMNS = (
    ("TTFT\nms", "ttft", "ms", ".2f"),
    ("ITL\nms", "itl", "ms", ".3f"),
    ("tok/s", "throughput", "tok/s", ".0f"),
    ("TTFT ms,\nmany", "ttft_together", "ms", ".1f"),
    ("chunks\n/token", "chunks", "chunks/token", ".2f"),
)
MAX_TTFT_MS, MIN_THROUGHPUT, MAX_CPU_US = 1.0, 0.9, 30.0


def figures_of(outcomes: Sequence[Outcome]) -> list[Figure]:
    figures = []
    for outcome in outcomes:
        name = outcome.strategy
        figures += [Figure(f"{name} {c}", outcome.sample(c).median, unit) for _, c, unit, _ in _COLUMNS]
        for role in outcome.roles:
            figure, value = f"{name} {role} worker CPU per token", outcome.cpu(role).median
            relays = _RELAYS.get(name) == role
            figures.append(
                at_most(figure, value, "us", MAX_CPU_US) if relays else Figure(figure, value, "us")
            )
    return figures + _against_baseline(outcomes)


def _against_baseline(outcomes: Sequence[Outcome]) -> list[Figure]:
    by_name = {outcome.strategy: outcome for outcome in outcomes}
    baseline = by_name.get(BASELINE)
    figures: list[Figure] = []
    for name, outcome in by_name.items():
        if baseline is None or name not in _WORKER_SIDE:
            continue
        slower = outcome.difference("ttft", baseline).median
        share = outcome.ratio("throughput", baseline).median
        figures.append(at_most(f"{name} TTFT - {BASELINE}", slower, "ms", MAX_TTFT_MS))
        figures.append(at_least(f"{name} tok/s / {BASELINE}", share, "x", MIN_THROUGHPUT))
    return figures


def print_report(outcomes: Sequence[Outcome], figures: Sequence[Figure], load_before: float) -> None:
    """The table fits a terminal of 80 columns."""
    console = wide_console()
    console.print(f"{describe_machine()}; load {load_before:.1f} before, {load():.1f} after")
    table = Table(
        title="An engine that costs nothing (no real tokens), medians of paired rounds",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("order", no_wrap=True)
    for header, *_ in _COLUMNS:
        table.add_column(header, justify="right")
    table.add_column("CPU\nus/token", no_wrap=True)
    for outcome in outcomes:
        cells = [format(outcome.sample(c).median, form) for _, c, _, form in _COLUMNS]
        cpu = "\n".join(f"{role} {outcome.cpu(role).median:.0f}" for role in outcome.roles)
        table.add_row(outcome.strategy, *cells, cpu)
    console.print(table)
    judged = [figure for figure in figures if figure.target is not None]
    for figure in judged:
        verdict = "missed" if figure.missed else "met"
        console.print(f"{verdict}: {figure.figure} {figure.value:.2f} {figure.unit}, target {figure.target}")
    if not judged:
        console.print(NOT_JUDGED)
