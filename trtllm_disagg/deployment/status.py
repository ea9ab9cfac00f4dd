"""What a person sees on stderr: a live table while loading on a terminal, else one line per change."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol, TextIO

from trtllm_disagg.deployment.process import ManagedProcess

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

COLOURS = {"planned": "dim", "starting": "yellow", "ready": "green", "stopping": "yellow", "exited": "red"}


class Status(Protocol):
    def loading(self, processes: Sequence[ManagedProcess]) -> AbstractContextManager[None]: ...

    def changed(self, process: ManagedProcess) -> None: ...

    def note(self, text: str) -> None: ...


class SilentStatus:
    """Nobody is watching: the caller is a program."""

    def loading(self, processes: Sequence[ManagedProcess]) -> AbstractContextManager[None]:
        return nullcontext()

    def changed(self, process: ManagedProcess) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class PlainStatus:
    """One line per change: for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def loading(self, processes: Sequence[ManagedProcess]) -> AbstractContextManager[None]:
        return nullcontext()

    def changed(self, process: ManagedProcess) -> None:
        end = f" ({process.describe_end()})" if process.state == "exited" else ""
        self.note(f"[{process.elapsed:6.1f}s] {process.name} pid={process.pid} {process.state}{end}")

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class TableStatus:
    """A table that lives while the deployment loads, then plain lines below it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self.console = Console(file=stream)
        self._plain = PlainStatus(stream)
        self._live: Live | None = None

    @contextmanager
    def loading(self, processes: Sequence[ManagedProcess]) -> Iterator[None]:
        from rich.live import Live

        try:
            with Live(console=self.console, get_renderable=lambda: process_table(processes)) as self._live:
                yield
        finally:
            self._live = None

    def changed(self, process: ManagedProcess) -> None:
        if self._live is None:
            self._plain.changed(process)

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def status_for(stream: TextIO = sys.stderr) -> Status:
    return TableStatus(stream) if stream.isatty() else PlainStatus(stream)


def process_table(processes: Sequence[ManagedProcess]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=True)
    for heading in ("process", "role", "pid", "state", "elapsed"):
        table.add_column(heading, no_wrap=True)
    table.add_column("last log line", no_wrap=True, overflow="ellipsis", ratio=1)
    for process in processes:
        last = process.last_lines(1)
        table.add_row(
            process.name,
            process.role,
            str(process.pid or "-"),
            Text(process.state, style=COLOURS[process.state]),
            f"{process.elapsed:.0f}s",
            Text(last[0] if last else ""),
        )
    return table
