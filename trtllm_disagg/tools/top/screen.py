"""The live screen of `trtllm-disagg top`. It fits 80 columns and 24 lines, and needs nothing but a terminal."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from typing import Any, ClassVar

from rich.console import JustifyMethod
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, RichLog, Static

from trtllm_disagg.exit_codes import ExitCode
from trtllm_disagg.tools.top.frame import COLUMNS, GAP, LEGEND, columns_that_fit, headline, latencies
from trtllm_disagg.tools.top.history import Event, History
from trtllm_disagg.tools.top.observers import Observer

_HELP = f"s sorts by the next column, r turns the order round, p pauses, q quits. {LEGEND}."


#: On a terminal Ctrl-C is a key press, so these signals come from other processes.
_ENDED_BY = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class Top(App[None]):
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; padding: 0 1; }
    #processes { height: auto; max-height: 60%; overflow-x: hidden; }
    #events { height: 1fr; border-top: solid $panel; padding: 0 1; overflow-x: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("s", "sort", "Sort"),
        ("r", "turn_round", "Reverse"),
        ("p", "pause", "Pause"),
        ("question_mark", "explain", "Help"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(self, observer: Observer, interval: float) -> None:
        super().__init__()
        self._observer = observer
        self._interval = interval
        self._history = History()
        #: Of COLUMNS; None: as `up` lists them.
        self._sorted_by: int | None = None
        self._is_reversed = False
        self._is_paused = False
        self._is_looking = False

    def compose(self) -> ComposeResult:
        yield Static("looking ...", id="headline")
        yield Static("", id="latencies")
        table: DataTable[Any] = DataTable(
            id="processes", cursor_type="none", zebra_stripes=True, cell_padding=1
        )
        yield table
        yield RichLog(id="events", wrap=True, max_lines=200, min_width=20)
        footer = Footer()
        footer.compact = True  # no argument yet in textual 5.3, which aiperf, of the extra `bench`, asks for
        yield footer

    def on_mount(self) -> None:
        # By default these signals would end the program without restoring the terminal.
        for number, code in _ENDED_BY.items():
            asyncio.get_running_loop().add_signal_handler(number, partial(self.exit, return_code=code))
        self.set_interval(self._interval, self.action_look)
        self.action_look()

    def action_look(self) -> None:
        """Take snapshots one after the other: a frozen process delays one snapshot, and never makes two overlap."""
        if not self._is_looking and not self._is_paused:
            self._is_looking = True
            self.run_worker(self._look(), exclusive=False, exit_on_error=True)

    async def _look(self) -> None:
        try:
            seen = await self._observer.look()
            for event in self._history.add(seen):
                self._tell(event)
            self._show()
        finally:
            self._is_looking = False

    def _tell(self, event: Event) -> None:
        line = Text(time.strftime("%H:%M:%S ", time.localtime(event.at)), style="dim")
        line.append(event.text, style="bold red" if event.is_bad else "default")
        self.query_one("#events", RichLog).write(line)

    def _show(self) -> None:
        if not self._history.looks:
            return
        seen = self._history.last
        line = headline(seen)
        if self._is_paused:
            line.append("  paused", style="bold yellow")
        self.query_one("#headline", Static).update(line)
        self.query_one("#latencies", Static).update(latencies(self._history))
        table: DataTable[Any] = self.query_one("#processes", DataTable)
        processes = list(seen.processes)
        marked = None if self._sorted_by is None else COLUMNS[self._sorted_by]
        if marked is not None:
            order = marked.order
            processes.sort(key=lambda process: order(process, self._history), reverse=self._is_reversed)
        mark = " ^" if self._is_reversed else " v"
        taken = GAP + table.scrollbar_size_vertical + (len(mark) if marked else 0)
        shown = list(columns_that_fit(COLUMNS, processes, self._history, self.size.width - taken))
        table.clear(columns=True)
        for column, cells in shown:
            justify: JustifyMethod = "right" if column.is_number else "left"
            table.add_column(Text(column.heading + (mark if column is marked else ""), justify=justify))
            for cell in cells:
                cell.justify = justify
        for row in zip(*(cells for _, cells in shown), strict=True):
            table.add_row(*row)

    def on_resize(self) -> None:
        self._show()

    def action_interrupt(self) -> None:
        self.exit(return_code=ExitCode.INTERRUPTED)

    def action_sort(self) -> None:
        self._sorted_by = 0 if self._sorted_by is None else (self._sorted_by + 1) % len(COLUMNS)
        self._show()

    def action_turn_round(self) -> None:
        self._is_reversed = not self._is_reversed
        self._show()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._show()

    def action_explain(self) -> None:
        self.query_one("#events", RichLog).write(Text(_HELP, style="yellow"))
