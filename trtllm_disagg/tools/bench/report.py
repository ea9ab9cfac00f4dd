"""What all benchmarks share: samples of measurements, figures with targets, progress on stderr, and tables or JSON on
stdout.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, TypeVar

from trtllm_disagg.config.settings import positive
from trtllm_disagg.processes.steadily import without_silence

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
class Figure:
    """One reported number, and its target, as ">= 0.9"; empty without one."""

    figure: str
    value: float
    unit: str
    target: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether it meets its target; None without one."""
        comparison, _, limit = self.target.partition(" ")
        return _COMPARISONS[comparison](self.value, float(limit)) if self.target else None

    @property
    def as_json(self) -> dict[str, Any]:
        """With four significant digits: more would be noise."""
        number = {"figure": self.figure, "value": rounded(self.value, 4), "unit": self.unit}
        return number | {"target": self.target or None, "ok": self.ok}


def rounded(number: float, digits: int) -> float:
    """`number` with so many significant digits."""
    return float(f"{number:.{digits}g}")


def spread(values: Sequence[float]) -> float:
    """Distance between the quartiles as a share of the median; 0 for a single value."""
    middle = median(values)
    if len(values) < 2 or not middle:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def paired_ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Ratios of measurements that are neighbours in time, so that a slow minute affects both."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def in_turn(subjects: Sequence[T], number: int) -> list[T]:
    """The subjects in the order of round `number`: each round begins with another one."""
    first = number % len(subjects)
    return [*subjects[first:], *subjects[:first]]


@dataclass(slots=True)
class Rounds:
    """Quantities of several subjects, measured in turns. Values at the same index are of the same round."""

    #: By subject and quantity.
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def subjects(self) -> list[str]:
        return list(self.values)

    def note(self, subject: str, measured: Mapping[str, float]) -> None:
        """Adds one round of `subject`: a value for each quantity."""
        for quantity, value in measured.items():
            self.values.setdefault(subject, {}).setdefault(quantity, []).append(value)

    def ratio(self, quantity: str, subject: str, baseline: str) -> float:
        """The median of the ratios subject / baseline, round by round."""
        return median(paired_ratios(self.values[subject][quantity], self.values[baseline][quantity]))

    def medians(self, subject: str) -> dict[str, float]:
        return {quantity: median(values) for quantity, values in self.values[subject].items()}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a grid. Without a `unit` its values are shown but are no figures."""

    name: str
    unit: str = ""
    form: str = ".2f"
    header: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of which every number is a figure."""

    title: str
    #: Headers for the names of a row; further names are not shown.
    labels: tuple[str, ...]
    columns: Sequence[Column]
    #: Numbers or texts, by the names of a row and the name of a column.
    rows: Mapping[Any, Mapping[str, Any]]
    #: The format of a figure's name: {0}, {1}, ... for a row's names, and {column}.
    naming: str

    @property
    def figures(self) -> list[Figure]:
        return [
            Figure(self.naming.format(*row, column=column.name), float(cells[column.name]), column.unit)
            for row, cells in self.rows.items()
            for column in self.columns
            if column.unit and column.name in cells
        ]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report: tables, remarks, and the figures that are in no table."""

    title: str = ""
    grids: Sequence[Grid] = ()
    remarks: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    #: Why a target would mean nothing, as a clause; empty where it means something.
    not_judged_because: str = ""

    @property
    def every_figure(self) -> list[Figure]:
        return [*(figure for grid in self.grids for figure in grid.figures), *self.figures]


def describe_machine() -> str:
    """`2 cores (AMD EPYC), 23 GiB`; no name of a host, a user or a path."""
    gib = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else "unknown CPU"
    return f"{len(os.sched_getaffinity(0))} cores ({cpu}), {gib:.0f} GiB"


def load() -> float:
    """Runnable processes, averaged over the last minute by the kernel; this benchmark's own are among them."""
    return os.getloadavg()[0]


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


def add_numbers(parser: argparse.ArgumentParser, flag: str, default: int, help: str) -> None:
    """As `add_number`, for one or more of them."""
    parser.add_argument(
        flag, type=positive, nargs="+", default=[default], metavar="N", help=f"{help} (default: {default})"
    )


def run_benchmark(
    name: str, args: argparse.Namespace, measure: Callable[[Say], T], report: Callable[[T], Sequence[Section]]
) -> T:
    """Measures, then prints as --json says."""
    before = load()
    with progress(name) as say:
        measured = measure(say)
    sections = report(measured)
    if args.json:
        print(json.dumps([figure.as_json for figure in figures_of(sections)], indent=1))
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
        replace(figure, target="") if section.not_judged_because else figure
        for section in sections
        for figure in section.every_figure
    ]


def print_report(console: Console, sections: Sequence[Section]) -> None:
    """Prints all tables, then how many targets are met."""
    for section in sections:
        for shown in (*map(_grid, section.grids), *section.remarks):
            console.print(shown)
        if section.figures:
            console.print(_figures(section.title, section.figures))
    with_target = [figure for figure in figures_of(sections) if figure.target]
    if not with_target:
        reasons = dict.fromkeys(filter(None, (section.not_judged_because for section in sections)))
        console.print(f"No target is judged: {'; '.join(reasons) or NOTHING_TO_JUDGE}.")
        return
    met = sum(bool(figure.ok) for figure in with_target)
    console.print(f"{met} of {len(with_target)} targets are met.")


def _grid(grid: Grid) -> Table:
    """Neighbours with the same first name are a group, if a row has several names."""
    shown = _table(grid.title, *grid.labels, *(f">{column.header or column.name}" for column in grid.columns))
    above = ""
    for (name, *others), cells in grid.rows.items():
        numbers = (_shown(cells.get(column.name, ""), column) for column in grid.columns)
        labels = others[: len(grid.labels) - 1]
        if labels and above not in ("", name):
            shown.add_section()
        shown.add_row("" if labels and above == name else name, *labels, *numbers)
        above = name
    return shown


def _shown(number: float | str, column: Column) -> str:
    if isinstance(number, str):
        return number
    return format(number, column.form) + ("x" if column.unit == "x" else "")


def _figures(title: str, figures: Iterable[Figure]) -> Table:
    shown = _table(title, "figure", ">value", "unit", "target", "")
    for each in figures:
        shown.add_row(each.figure, f"{rounded(each.value, 4):g}", each.unit, each.target, _VERDICTS[each.ok])
    return shown


def _table(title: str, *headers: str) -> Table:
    """A header that begins with > is that of a column of numbers: aligned to the right, and never wrapped."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for header in headers:
        is_number = header.startswith(">")
        shown.add_column(
            header.removeprefix(">"), justify="right" if is_number else "left", no_wrap=is_number
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
