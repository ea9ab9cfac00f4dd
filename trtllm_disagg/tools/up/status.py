"""Prints `up`'s progress to stderr, as a live table on a terminal, else line by line; and reports failures: a sentence
with the cause, then the end of the log.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from trtllm_disagg.common.machine import INOTIFY_KEY
from trtllm_disagg.common.reports import DRAINING
from trtllm_disagg.errors import ERROR_PREFIX
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import NO_WORKERS

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {
    "planned": "dim",
    "starting": "yellow",
    "ready": "green",
    "stopping": "yellow",
    "exited": "red",
    "restarting": "red",
}
REFRESHES_PER_SECOND = 2
POLL_SECONDS = 0.5
#: Without a terminal, `up` prints at least this often while a process starts or stops.
SILENCE_SECONDS = 10.0
#: States that end by themselves; `up` waits for that.
CHANGING = ("starting", "stopping")
LOG_LINES = 15
#: Last lines of the log that are searched for the cause.
SEARCHED_LINES = 400
LAST_LINES = 5
#: Max length of a cause; the log has it in full.
MAX_CHARS = 600
#: Max length of a log line in a report.
LINE_CHARS = 240
#: Dynamo's error when it cannot watch another directory.
NO_INOTIFY = "Too many open files (os error 24)"
#: With less disk space, a process fails to write.
LEAST_FREE_BYTES = 1 << 20
#: Dynamo logs these at each start; they explain no death.
LOGGED_INFO = re.compile(r"^\S+Z\s+INFO \S+: ")
#: An error in Dynamo's log; group 1: its message.
LOGGED_ERROR = re.compile(r"^\S+Z\s+ERROR \S+: (.+)$")
#: Dynamo's frontend cannot serve a model of its workers; group 1: the reason.
UNSERVED = re.compile(r'Model materialization failed.* error="(.+)"$')
EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*$")


class Status:
    """Shows nothing; for programs."""

    def showing(self, processes: Sequence[ManagedProcess]) -> AbstractAsyncContextManager[None]:
        """Shows the processes inside the block; the sequence may change."""
        return nullcontext()

    def changed(self, process: ManagedProcess) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class PlainStatus(Status):
    """Prints a line per change, for logs and pipes."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream
        self._clock = clock
        self._began = self._wrote = clock()
        self._shown: dict[str, str] = {}

    @asynccontextmanager
    async def showing(self, processes: Sequence[ManagedProcess]) -> AsyncIterator[None]:
        follower = asyncio.create_task(self._follow(processes))
        try:
            yield
        finally:
            follower.cancel()
            await asyncio.wait((follower,))

    def changed(self, process: ManagedProcess) -> None:
        end = f" ({process.describe_end()})" if process.state == "exited" else ""
        # A growing percentage is not a change.
        doing = process.activity.doing if process.state in CHANGING else ""
        line = f"{process.name} pid={process.pid} {process.state}{end}" + (f": {doing}" if doing else "")
        if self._shown.get(process.name) != line:
            self._shown[process.name] = line
            self._line(line)

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)
        self._wrote = self._clock()

    def update(self, processes: Iterable[ManagedProcess]) -> None:
        """Prints changes since the last call, or, after a silence, which processes `up` waits for."""
        changing = [process for process in processes if process.state in CHANGING]
        for process in changing:
            self.changed(process)
        if changing and self._clock() - self._wrote >= SILENCE_SECONDS:
            self._line(f"waiting for {_doings(changing)}")

    async def _follow(self, processes: Sequence[ManagedProcess]) -> None:
        while True:
            self.update(processes)
            await asyncio.sleep(POLL_SECONDS)

    def _line(self, text: str) -> None:
        self.note(f"[{self._clock() - self._began:6.1f}s] {text}")


class TableStatus(Status):
    """Shows a live table, and messages above it."""

    def __init__(self, stream: TextIO) -> None:
        from trtllm_disagg.common.console import Console

        self.console = Console(stream)
        self._began = time.monotonic()

    @asynccontextmanager
    async def showing(self, processes: Sequence[ManagedProcess]) -> AsyncIterator[None]:
        from rich.live import Live

        with Live(
            console=self.console,
            get_renderable=lambda: process_table(list(processes), self._began),
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=False,
        ):
            yield

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


class LossyStream:
    """Drops text that it cannot write, because the terminal or the pipe's reader is gone, or the disk is full. The
    deployment keeps running, and drains when it stops.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def status_for(stream: TextIO) -> Status:
    lossy = cast(TextIO, LossyStream(stream))
    return TableStatus(lossy) if stream.isatty() else PlainStatus(lossy)


def what_it_does(process: ManagedProcess) -> str:
    """A process's activity in a few words, for users."""
    activity = process.activity
    match process.state:
        case "planned":
            return "waits for its turn"
        case "restarting":
            left = max(0.0, process.restart_at - time.monotonic())
            return f"{process.describe_end()}; restarting in {left:.0f} s"
        case "exited":
            return process.describe_end()
        case "starting" if process.role == "frontend":
            reason = unserved_because(process)
            waits = "waits for a worker to register the model"
            return waits if reason is None else f"cannot serve the model: {reason}"
        case "starting":
            return str(activity) or "starting"
        case "stopping":
            return str(activity) if activity.doing == DRAINING else "stopping"
    return str(activity) or "serving"


def age(seconds: float) -> str:
    """A duration as short as in `kubectl get`."""
    for unit, sign in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:.0f}{sign}"
    return f"{seconds:.0f}s"


def process_table(processes: Sequence[ManagedProcess], began: float) -> Table:
    """`began`: start of `up`, on the monotonic clock."""
    from rich.table import Table
    from rich.text import Text

    now = time.monotonic()
    table = Table(box=None, pad_edge=False, title=f"up for {now - began:.0f} s", title_justify="left")
    # On a narrow terminal, only the last column is cut.
    for heading, least in (
        ("process", max((len(process.name) for process in processes), default=0)),
        ("pid", 0),
        ("state", max(map(len, COLOURS))),
    ):
        table.add_column(heading, no_wrap=True, min_width=least)
    table.add_column("for", no_wrap=True, justify="right")
    table.add_column("what it does", no_wrap=True, overflow="ellipsis")
    for process in processes:
        table.add_row(
            process.name,
            str(process.pid or "-"),
            Text(process.state, style=COLOURS[process.state]),
            age(now - process.changed_at),
            Text(what_it_does(process)),
        )
    return table


def cause_in(lines: Sequence[str]) -> str | None:
    """The last error that a process printed: this package's, else Python's or Dynamo's."""
    for line in reversed(lines):
        if line.startswith(ERROR_PREFIX):
            return _short(line.removeprefix(ERROR_PREFIX), MAX_CHARS)
    # The last error ended the process; earlier ones may be harmless.
    for line in reversed(lines[-LAST_LINES:]):
        if EXCEPTION.match(line):
            return _short(line, MAX_CHARS)
        if logged := LOGGED_ERROR.match(line):
            return _short(logged[1], MAX_CHARS)
    return None


def unserved_because(frontend: ManagedProcess) -> str | None:
    """Why a frontend does not serve its workers' model, usually because of tokenizer files. Dynamo retries, which helps
    once a file appears.
    """
    found = (UNSERVED.search(line) for line in reversed(frontend.last_lines(SEARCHED_LINES)))
    return next((_short(each[1], LINE_CHARS) for each in found if each), None)


def death_report(process: ManagedProcess, when: str) -> str:
    """Which process died and why, then the end of its log."""
    # A killed process cannot print a cause.
    cause = None if process.was_killed else cause_in(process.last_lines(SEARCHED_LINES))
    end = process.describe_end()
    what = end if cause is None else f"{cause} ({end})"
    if any(NO_INOTIFY in line for line in process.last_lines(SEARCHED_LINES)):
        what += f"; `{NO_INOTIFY}` can also mean too few inotify instances: sudo sysctl {INOTIFY_KEY}=1024"
    with suppress(OSError):  # the run directory is gone, too
        if shutil.disk_usage(process.log.parent).free < LEAST_FREE_BYTES:
            what += f"; the disk of {process.log.parent} is full, so the log may be cut off"
    lines = [line for line in process.last_lines(SEARCHED_LINES) if not LOGGED_INFO.match(line)]
    lines = lines[-LOG_LINES:] or ["(the log is empty)"]
    return "\n".join(
        [
            f"{process.name} died {when}: {what}, pid {process.pid}, {process.elapsed:.1f} s after its start",
            f"last lines of {process.log}:",
            *(f"  {_short(line, LINE_CHARS)}" for line in lines),
        ]
    )


def continued(report: str, then: str) -> str:
    """Adds what happens next to a report's first line."""
    first, *others = report.split("\n")
    return "\n".join([f"{first}; {then}", *others])


def left_report(process: ManagedProcess, *, is_last: bool) -> str:
    """A worker that another program stopped. `is_last`: none of its role is left."""
    left = f"{process.name} has left: another program stopped it"
    if not is_last or process.role in NO_WORKERS:
        return left
    return f"{left}; it was the last {process.role} worker: {_scale_command(process)} starts one"


def given_up_report(process: ManagedProcess, report: str, failed_starts: int) -> str:
    then = f"given up after {failed_starts} failed starts"
    if process.role not in NO_WORKERS:
        then += f"; fix the cause, then {_scale_command(process)}"
    return continued(report, then)


def _scale_command(process: ManagedProcess) -> str:
    return f"`trtllm-disagg scale --run-dir {process.log.parent} --{process.role} N`"


def late_report(processes: Iterable[ManagedProcess], timeout: float) -> str:
    late = [process for process in processes if process.state != "ready"]
    lines = [f"not ready after {timeout:g} s: {_doings(late)}; --startup-timeout sets the limit"]
    for process in late:
        last = process.last_lines(1) or ["(the log is empty)"]
        lines.append(f"  {process.name} (pid {process.pid}, {process.log}): {last[0]}")
    return "\n".join(lines)


def _doings(processes: Iterable[ManagedProcess]) -> str:
    return ", ".join(f"{process.name} ({what_it_does(process)})" for process in processes)


def _short(text: str, max_chars: int) -> str:
    text = text.strip()
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."
