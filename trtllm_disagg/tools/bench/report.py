"""What all benchmark commands share: progress on stderr, tables or JSON on stdout, and targets (`TARGETS`).

A figure is judged by the first row with a pattern that matches its name. Without such a row it has no target.
"""

from __future__ import annotations

import argparse
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from trtllm_disagg.config.settings import positive
from trtllm_disagg.processes.steadily import without_silence
from trtllm_disagg.tools.bench.figures import (
    Column,
    Figure,
    Grid,
    Section,
    rounded,
    to_json,
)
from trtllm_disagg.tools.bench.machine import describe_machine, load
from trtllm_disagg.tools.bench.seed_scenarios import SEED_RATIOS

if TYPE_CHECKING:
    from rich.table import Table

    from trtllm_disagg.cli import Parser
    from trtllm_disagg.console import Console

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
}
TOO_SHORT = "the run is too short"
NOTHING_TO_JUDGE = "none is for what was measured on this machine"
_VERDICTS = {True: "met", False: "missed", None: ""}
#: The width of the widest table in characters; rich would cut it to 80 in a file.
_WIDTH = 120
_CLEAR = "\r\x1b[K"
T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bound:
    """A target for figures with a name that matches `pattern`."""

    pattern: str
    comparison: str
    limit: float

    def judge(self, figure: Figure) -> Figure:
        ok = bool(_COMPARISONS[self.comparison](figure.value, self.limit))
        return replace(figure, target=f"{self.comparison} {self.limit:g}", ok=ok)


TARGETS = (
    # bench scenarios: the post's own ratios, beside its own baseline, at any size.
    *(
        Bound(f"* {scenario} {column} best disaggregated/mono-post", comparison, ratios[column])
        for scenario, ratios in SEED_RATIOS.items()
        for column, comparison in (("throughput", ">="), ("ttft", "<="))
    ),
    Bound("token mismatches", "==", 0),
    # bench overhead: the worker-side orders beside the chain of the frontend, and a token that a worker relays.
    Bound("*_first TTFT - router", "<=", 1.0),
    Bound("*_first tok/s / router", ">=", 0.9),
    Bound("*, 1% traced: tok/s / none", ">=", 0.98),
    Bound("prefill_first prefill worker CPU per token", "<=", 30.0),
)


def judged(figure: Figure) -> Figure:
    """The figure with its target, if there is one."""
    bound = next((bound for bound in TARGETS if fnmatchcase(figure.figure, bound.pattern)), None)
    return bound.judge(figure) if bound else figure


def add_output_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print figures instead of tables")
    parser.replaced = {"--plot": "use --json, which has every figure"}


def add_choice(
    parser: argparse.ArgumentParser, flag: str, choices: Iterable[str], help: str, nargs: str = "+"
) -> None:
    """Adds a flag that takes one or more of `choices`, or as many as `nargs` says; all are the default."""
    every = list(choices)
    parser.add_argument(flag, choices=every, nargs=nargs, default=every, help=f"{help} (default: all)")


def add_number(
    parser: argparse.ArgumentParser,
    flag: str,
    default: float,
    help: str,
    type: Callable[[str], float] = positive,
    metavar: str = "N",
) -> None:
    help = f"{help} (default: %(default)s)"
    parser.add_argument(flag, type=type, default=default, metavar=metavar, help=help)


def run_benchmark(
    name: str, args: argparse.Namespace, measure: Callable[[Say], T], report: Callable[[T], Sequence[Section]]
) -> T:
    """Measures, then prints as --json says."""
    before = load()
    with progress(name) as say:
        measured = measure(say)
    sections = report(measured)
    if args.json:
        print(to_json(figures_of(sections)))
    else:
        # Imported here because `--help` needs no engine.
        from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu

        console = wide_console()
        console.print(
            f"{describe_machine()}, CPU level {this_cpu()}; load {before:.1f} before, {load():.1f} after"
        )
        print_report(console, sections)
    return measured


def figures_of(sections: Iterable[Section]) -> list[Figure]:
    return [
        figure if section.not_judged_because else judged(figure)
        for section in sections
        for figure in section.every_figure
    ]


def print_report(console: Console, sections: Sequence[Section]) -> None:
    """Prints all tables, then the figures with a target and how many are met."""
    print_tables(console, sections)
    with_target = [figure for figure in figures_of(sections) if figure.target]
    if not with_target:
        reasons = dict.fromkeys(filter(None, (section.not_judged_because for section in sections)))
        console.print(f"No target is judged: {'; '.join(reasons) or NOTHING_TO_JUDGE}.")
        return
    console.print(_figures("Targets", with_target))
    met = sum(bool(figure.ok) for figure in with_target)
    console.print(f"{met} of {len(with_target)} targets are met.")


def print_tables(console: Console, sections: Sequence[Section]) -> None:
    for section in sections:
        for grid in section.grids:
            console.print(_grid(grid))
        for remark in section.remarks:
            console.print(remark)
        if section.figures:
            console.print(_figures(section.title, section.figures))


def _grid(grid: Grid) -> Table:
    headers = (*grid.labels, *(f">{column.header or column.name}" for column in grid.columns))
    rows = [
        [*row[: len(grid.labels)], *(_shown(cells.get(column.name, ""), column) for column in grid.columns)]
        for row, cells in grid.rows.items()
    ]
    shown, group = _table(grid.title, headers, rows), ""
    several = len(grid.labels) > 1
    for first, *others in rows:
        if several and group not in ("", first):
            shown.add_section()
        shown.add_row("" if several and group == first else first, *others)
        group = first
    return shown


def _shown(number: float | str, column: Column) -> str:
    if isinstance(number, str):
        return number
    return format(number, column.form) + ("x" if column.unit == "x" else "")


def _figures(title: str, figures: Iterable[Figure]) -> Table:
    rows = [
        (each.figure, f"{rounded(each.value, 4):g}", each.unit, each.target or "", _VERDICTS[each.ok])
        for each in figures
    ]
    shown = _table(title, ("figure", ">value", "unit", "target", ""), rows)
    for row in rows:
        shown.add_row(*row)
    return shown


def _table(title: str, headers: Iterable[str], rows: Sequence[Sequence[str]]) -> Table:
    """A header that begins with > is that of a column of numbers, aligned to the right. On a narrow terminal names are
    wrapped; a number stays whole.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for at, header in enumerate(headers):
        name = header.removeprefix(">")
        words = [word for text in (name, *(row[at] for row in rows)) for word in text.split()]
        shown.add_column(
            name, justify="right" if name != header else "left", min_width=max(map(len, words), default=0)
        )
    return shown


def wide_console() -> Console:
    from trtllm_disagg.console import Console

    return Console(paper=_WIDTH)


@contextmanager
def progress(name: str) -> Iterator[Say]:
    """Shows on stderr what is being measured, repeatedly: in one line on a terminal, in new lines elsewhere."""
    started, rewrites = time.monotonic(), sys.stderr.isatty()
    start, end = (_CLEAR, "") if rewrites else ("", "\n")

    def show(text: str) -> None:
        line = f"bench {name} [{time.monotonic() - started:4.0f} s] {text}"
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    try:
        with without_silence(show, "preparing") as say:
            yield say
    finally:
        print(start, end="", file=sys.stderr, flush=True)
