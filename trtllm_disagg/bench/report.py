"""What every benchmark command does around its measurement: progress on stderr, tables or JSON on stdout, a plot."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Table

from trtllm_disagg.bench.figures import Figure, to_json
from trtllm_disagg.bench.machine import describe_machine, load
from trtllm_disagg.bench.plot import Panel, draw, require_matplotlib

NOT_JUDGED = "No target is judged: for that the run is too short, or compares too little."
_VERDICTS = {True: "met", False: "missed", None: ""}
#: Columns that the widest table needs; rich would cut it to 80 in a file.
_WIDTH = 120
_CLEAR = "\r\x1b[K"
T = TypeVar("T")
Say = Callable[[str], None]


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print figures instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a PNG; needs matplotlib")


def run_benchmark(
    name: str,
    args: argparse.Namespace,
    measure: Callable[[Say], T],
    figures_of: Callable[[T], Sequence[Figure]],
    print_tables: Callable[[Console, T], None],
    panels_of: Callable[[T], Sequence[Panel]],
) -> T:
    """Measures once and says it as --json and --plot ask for. Raises ConfigError before, not after, measuring."""
    if args.plot is not None:
        require_matplotlib()
    before = load()
    with Progress(name) as progress:
        measured = measure(progress.say)
    figures = figures_of(measured)
    if args.json:
        print(to_json(figures))
    else:
        console = wide_console()
        console.print(f"{describe_machine()}; load {before:.1f} before, {load():.1f} after")
        print_tables(console, measured)
        print_verdicts(console, figures)
    if args.plot is not None:
        draw(panels_of(measured), f"trtllm-disagg bench {name}", args.plot)
    return measured


def print_verdicts(console: Console, figures: Sequence[Figure]) -> None:
    judged = [figure for figure in figures if figure.ok is not None]
    if not judged:
        console.print(NOT_JUDGED)
        return
    console.print(figures_table("Targets", judged))
    met = sum(bool(figure.ok) for figure in judged)
    console.print(f"{met} of {len(judged)} targets are met.")


def figures_table(title: str, figures: Iterable[Figure]) -> Table:
    shown = table(title, ("figure", ">value", "unit", "target", ""))
    for figure in figures:
        value = f"{float(f'{figure.value:.4g}'):g}"
        shown.add_row(figure.figure, value, figure.unit, figure.target or "", _VERDICTS[figure.ok])
    return shown


def table(title: str, headers: Iterable[str], box: Box = HEAVY_HEAD) -> Table:
    """A header that starts with > is of numbers, which stand to the right."""
    shown = Table(title=title, title_justify="left", box=box, pad_edge=box is HEAVY_HEAD)
    for header in headers:
        is_number = header.startswith(">")
        shown.add_column(
            header.removeprefix(">"), justify="right" if is_number else "left", no_wrap=not is_number
        )
    return shown


def wide_console() -> Console:
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


class Progress:
    """One line on stderr that says what is being measured: rewritten on a terminal, appended anywhere else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = time.monotonic()
        self._rewrites = sys.stderr.isatty()

    def say(self, text: str) -> None:
        line = f"bench {self._name} [{time.monotonic() - self._started:4.0f} s] {text}"
        start, end = (_CLEAR, "") if self._rewrites else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rewrites:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
