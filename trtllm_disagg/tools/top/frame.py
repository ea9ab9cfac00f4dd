"""Renders one frame as text or JSON. The live screen and plain output share words and columns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trtllm_disagg.common.console import Console
from trtllm_disagg.tools.top.snapshot import DEAD, SILENT, Event, History, Latency, Process, Snapshot
from trtllm_disagg.tools.up.status import COLOURS

_STYLES = {**COLOURS, DEAD: "bold red", SILENT: "bold red", "listed": "green"}
_ABSENT = "-"
#: Width of plain output.
_WIDTH = 80
#: Space between columns, and the min width of `doing`.
_GAP, _LEAST_DOING = 2, 10

Cell = str | Text


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    cell: Callable[[Process, History], Cell]
    is_number: bool = True


def _count(heading: str, name: str) -> Column:
    return Column(heading, lambda p, h: _shown(getattr(p.load, name)))


def _rate(heading: str, total: str) -> Column:
    return Column(heading, lambda p, h: _shown(h.rate(p, total)))


COLUMNS: tuple[Column, ...] = (
    Column("process", lambda p, h: p.name, is_number=False),
    Column("state", lambda p, h: Text(p.state, style=_STYLES.get(p.state, "")), is_number=False),
    _count("batch", "batch"),
    _count("queue", "queued"),
    Column("KV", lambda p, h: _ABSENT if p.load.kv_use is None else f"{p.load.kv_use:.0%}"),
    _count("held", "handoffs_held"),
    _rate("in/s", "prefill_tokens"),
    _rate("out/s", "decode_tokens"),
    _count("open", "breakers_open"),
    # For `flip`, which also takes the name: dropped before `doing` is.
    Column("id", lambda p, h: p.instance or _ABSENT, is_number=False),
    # A serving worker's numbers say more.
    Column("doing", lambda p, h: "" if p.state == "ready" else p.doing, is_number=False),
)
*_, _ID, _DOING = COLUMNS


def columns_that_fit(
    columns: Iterable[Column], processes: Iterable[Process], history: History, width: int
) -> Iterator[tuple[Column, list[Text]]]:
    """The first columns that fit into `width`, with their cells. Only `doing` is cut, since half a number is a wrong
    one.
    """
    rows = list(processes)
    for column in columns:
        cells = [Text.assemble(column.cell(process, history)) for process in rows]
        used = max(len(column.heading), *(cell.cell_len for cell in cells), 0)
        if column is _DOING and _LEAST_DOING <= width < used:
            for cell in cells:
                cell.truncate(width, overflow="ellipsis")
            used = width
        if column is _ID and used + _GAP + _LEAST_DOING > width:
            continue
        if used > width:
            return
        yield column, cells
        width -= used + _GAP


def headline(seen: Snapshot) -> Text:
    """The first line: model, strategy and URL."""
    parts = [part for part in (seen.model, seen.strategy, seen.url) if part]
    line = Text("  ".join(parts) or "nothing known yet")
    if seen.doubt:
        line.append(f"  {seen.doubt}", style="bold red")
    return line


def latencies(history: History) -> str:
    """Latencies of the last seconds on the live screen, of all requests in a single frame."""
    frontend = history.last.frontend
    counts = f"running {_shown(frontend.running)}, waiting {_shown(frontend.waiting)}, done {_shown(frontend.requests)}"
    # Two lines, since long times would exceed 80 columns.
    return f"TTFT {_latency(history.ttft())}  ITL {_latency(history.itl())}\n{counts}"


def print_frame(seen: Snapshot, console: Console | None = None) -> None:
    console = console or Console(paper=_WIDTH)
    history = History()
    history.add(seen)
    # A single snapshot has no rates.
    known = [column for column in COLUMNS if not column.heading.endswith("/s")]
    console.print(headline(seen), latencies(history), _table(known, history, console.width), sep="\n")


def live_frame(history: History, width: int, height: int) -> Group:
    """One frame of the live screen: the processes, and as many recent events as fit."""
    room = max(0, height - len(history.last.processes) - 6)
    events = [_event(event) for event in history.events][-room:] if room else []
    return Group(headline(history.last), latencies(history), _table(COLUMNS, history, width), "", *events)


def _event(event: Event) -> Text:
    line = Text(
        time.strftime("%H:%M:%S ", time.localtime(event.at)), style="dim", overflow="ellipsis", no_wrap=True
    )
    return line.append(event.text, style="bold red" if event.is_bad else "default")


def _table(columns: Iterable[Column], history: History, width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    shown = list(columns_that_fit(columns, history.last.processes, history, width))
    for column, _ in shown:
        table.add_column(column.heading, justify="right" if column.is_number else "left", no_wrap=True)
    for row in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*row)
    return table


def to_json(seen: Snapshot) -> str:
    history = History()
    history.add(seen)
    frontend = seen.frontend
    ttft, itl = history.ttft(), history.itl()
    return json.dumps(
        {
            "at": seen.at,
            "url": seen.url,
            "model": seen.model,
            "strategy": seen.strategy,
            "doubt": seen.doubt,
            "frontend": {
                "running": frontend.running,
                "waiting": frontend.waiting,
                "requests": frontend.requests,
                "ttft_seconds": ttft and asdict(ttft),
                "itl_seconds": itl and asdict(itl),
            },
            "processes": [asdict(process) for process in seen.processes],
        },
        indent=2,
    )


def _latency(measured: Latency | None) -> str:
    return _ABSENT if measured is None else f"{_ms(measured.p50)} p99 {_ms(measured.p99)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _shown(value: float | None) -> str:
    if value is None:
        return _ABSENT
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"
