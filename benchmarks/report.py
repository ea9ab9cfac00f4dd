"""What all benchmarks share: samples, figures with targets, progress on stderr, tables or JSON on stdout."""

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
from typing import Any, NoReturn, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table

from trtllm_disagg.common.console import Console
from trtllm_disagg.common.exits import ExitCode, ending_as_on_ctrl_c
from trtllm_disagg.common.steadily import without_silence
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.errors import ERROR_PREFIX, ConfigError, DisaggError
from trtllm_disagg.tools.flag_types import positive

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
}
TOO_SHORT = "the run is too short"
NOTHING_TO_JUDGE = "none is for what was measured on this machine"
_VERDICTS = {True: "met", False: "missed", None: ""}
#: Characters of the widest table; rich would cut it at 80 in a file.
_WIDTH = 120
_CLEAR = "\r\x1b[K"
T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """A reported number and its target (">= 0.9"; empty: none)."""

    figure: str
    value: float
    unit: str
    target: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the value meets the target; None without a target."""
        comparison, _, limit = self.target.partition(" ")
        return _COMPARISONS[comparison](self.value, float(limit)) if self.target else None

    @property
    def as_json(self) -> dict[str, Any]:
        """The figure with four significant digits; more would be noise."""
        number = {"figure": self.figure, "value": rounded(self.value, 4), "unit": self.unit}
        return number | {"target": self.target or None, "ok": self.ok}


def rounded(number: float, digits: int) -> float:
    """`number` rounded to `digits` significant digits."""
    return float(f"{number:.{digits}g}")


def spread(values: Sequence[float]) -> float:
    """Distance between the quartiles as a share of the median; 0 for a single value."""
    middle = median(values)
    if len(values) < 2 or not middle:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def paired_ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Ratios of measurements at the same time, so a slow minute affects both."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def rotated(subjects: Sequence[T], number: int) -> list[T]:
    """The subjects in the order of round `number`: each round starts with another subject."""
    first = number % len(subjects)
    return [*subjects[first:], *subjects[:first]]


@dataclass(slots=True)
class Rounds:
    """Measured quantities of several subjects: a list with one value per round for each."""

    #: Subject -> quantity -> value per round.
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def subjects(self) -> list[str]:
        return list(self.values)

    def note(self, subject: str, measured: Mapping[str, float]) -> None:
        """Add a round of `subject`: quantity -> value."""
        for quantity, value in measured.items():
            self.values.setdefault(subject, {}).setdefault(quantity, []).append(value)

    def ratio(self, quantity: str, subject: str, baseline: str) -> float:
        """Median over rounds of subject / baseline."""
        return median(paired_ratios(self.values[subject][quantity], self.values[baseline][quantity]))

    def medians(self, subject: str) -> dict[str, float]:
        return {quantity: median(values) for quantity, values in self.values[subject].items()}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a grid. Without a `unit` its values are shown, but not reported as figures."""

    name: str
    unit: str = ""
    form: str = ".2f"
    header: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; each number is a figure."""

    title: str
    #: Headers of the first names of a row; further names are not shown.
    labels: tuple[str, ...]
    columns: Sequence[Column]
    #: Names of a row -> name of a column -> number or text.
    rows: Mapping[Any, Mapping[str, Any]]
    #: Format of a figure's name, with {0}, {1}, ... (the row's names) and {column}.
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
    """A part of a report: tables, remarks, and figures outside of tables."""

    title: str = ""
    grids: Sequence[Grid] = ()
    remarks: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    #: Why targets are not judged, as a clause; empty: they are.
    not_judged_because: str = ""

    @property
    def every_figure(self) -> list[Figure]:
        return [*(figure for grid in self.grids for figure in grid.figures), *self.figures]


def describe_machine() -> str:
    """For example `2 cores (AMD EPYC), 23 GiB`. Has no name of a host or user, and no path."""
    gib = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else "unknown CPU"
    return f"{len(os.sched_getaffinity(0))} cores ({cpu}), {gib:.0f} GiB"


def load() -> float:
    """The kernel's load average of the last minute, which includes this benchmark."""
    return os.getloadavg()[0]


def end_program(main: Callable[[], ExitCode]) -> NoReturn:
    """Run a benchmark, and exit like a command of trtllm-disagg."""
    try:
        with ending_as_on_ctrl_c():
            sys.exit(main())
    except ConfigError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        sys.exit(ExitCode.WRONG_SETTING)
    except DisaggError as error:
        sys.exit(f"{ERROR_PREFIX}{error}")
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print figures instead of tables")


def add_choice(
    parser: argparse.ArgumentParser, flag: str, choices: Iterable[str], help: str, nargs: str = "+"
) -> None:
    """Add a flag for one or more of `choices` (or `nargs` of them); the default is all."""
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
    """Like `add_number`, for one or more numbers."""
    parser.add_argument(
        flag, type=positive, nargs="+", default=[default], metavar="N", help=f"{help} (default: {default})"
    )


def run_benchmark(
    name: str, args: argparse.Namespace, measure: Callable[[Say], T], report: Callable[[T], Sequence[Section]]
) -> T:
    """Measure, then print tables, or JSON with --json."""
    before = load()
    with progress(name) as say:
        measured = measure(say)
    sections = report(measured)
    if args.json:
        print(json.dumps([figure.as_json for figure in figures_of(sections)], indent=1))
    else:
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
    """Print all tables, then the number of targets that are met."""
    for section in sections:
        for shown in (*map(_grid, section.grids), *section.remarks):
            console.print(shown)
        if section.figures:
            console.print(_figures(section.title, figures_of([replace(section, grids=[])])))
    with_target = [figure for figure in figures_of(sections) if figure.target]
    if not with_target:
        reasons = dict.fromkeys(filter(None, (section.not_judged_because for section in sections)))
        console.print(f"No target is judged: {'; '.join(reasons) or NOTHING_TO_JUDGE}.")
        return
    met = sum(bool(figure.ok) for figure in with_target)
    console.print(f"{met} of {len(with_target)} targets are met.")


def _grid(grid: Grid) -> Table:
    """Draw a grid. If rows have several names, neighbours with the same first name form a group."""
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
    """`headers`: ">" marks a column of numbers, aligned to the right and never wrapped."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for header in headers:
        is_number = header.startswith(">")
        shown.add_column(
            header.removeprefix(">"), justify="right" if is_number else "left", no_wrap=is_number
        )
    return shown


def wide_console() -> Console:
    return Console(paper=_WIDTH)


@contextmanager
def progress(name: str) -> Iterator[Say]:
    """Show on stderr what is being measured: on a terminal in one line, elsewhere in new lines."""
    started, rewrites = time.monotonic(), sys.stderr.isatty()
    start, end = (_CLEAR, "") if rewrites else ("", "\n")

    def show(text: str) -> None:
        line = f"{name} [{time.monotonic() - started:4.0f} s] {text}"
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    try:
        with without_silence(show, "preparing") as say:
            yield say
    finally:
        print(start, end="", file=sys.stderr, flush=True)
