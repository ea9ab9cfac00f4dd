"""What `up` shows of its processes, on a terminal and without one."""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.clock import Clock
from trtllm_disagg.processes.reports import ACTIVITY_VARIABLE, FileReporter
from trtllm_disagg.tools.up.managed_process import ManagedProcess, State
from trtllm_disagg.tools.up.plan import ProcessRole, ProcessSpec
from trtllm_disagg.tools.up.status import (
    SILENCE_SECONDS,
    PlainStatus,
    age,
    process_table,
    status_for,
    what_it_does,
)


class Told:
    """A process that does not run, and what its worker would tell."""

    def __init__(self, directory: Path, name: str, state: State) -> None:
        file = directory / f"{name}.activity"
        role: ProcessRole = "frontend" if name == "frontend" else "decode"
        self.process = ManagedProcess(
            ProcessSpec(name, role, ("true",), {ACTIVITY_VARIABLE: str(file)}), directory / f"{name}.log"
        )
        self.process.state = state
        self.reporter = FileReporter(file)


@pytest.fixture
def decode(tmp_path: Path) -> Told:
    return Told(tmp_path, "decode-0", "starting")


def test_without_a_terminal_each_activity_is_one_line_and_progress_none(
    decode: Told,
) -> None:
    clock, stream = Clock(50.0), io.StringIO()
    status = PlainStatus(stream, clock)

    for percent in (1, 43):
        clock.now += 1
        decode.reporter.tell("loading weights", percent=percent)
        status.update([decode.process])
    clock.now += 1
    decode.reporter.tell("warming up")
    status.update([decode.process])

    assert stream.getvalue().splitlines() == [
        "[   1.0s] decode-0 pid=0 starting: loading weights",
        "[   3.0s] decode-0 pid=0 starting: warming up",
    ]


def test_without_a_terminal_a_silence_ends_after_10_s_with_what_is_waited_for(
    decode: Told, tmp_path: Path
) -> None:
    clock, stream = Clock(50.0), io.StringIO()
    status = PlainStatus(stream, clock)
    frontend, ready = Told(tmp_path, "frontend", "starting"), Told(tmp_path, "decode-1", "ready")
    processes = [frontend.process, decode.process, ready.process]
    decode.reporter.tell("loading weights", percent=43)
    status.update(processes)

    clock.now += SILENCE_SECONDS - 0.1
    status.update(processes)
    clock.now += 0.1
    status.update(processes)

    assert stream.getvalue().splitlines()[2:] == [
        "[  10.0s] waiting for frontend (waits for a worker that registers the model), "
        "decode-0 (loading weights 43 %)"
    ]


def test_plain_status_writes_nothing_while_serving(tmp_path: Path) -> None:
    clock, stream = Clock(50.0), io.StringIO()
    status = PlainStatus(stream, clock)
    ready = Told(tmp_path, "decode-1", "ready")

    for requests in range(3):
        clock.now += SILENCE_SECONDS
        ready.reporter.tell("serving", requests=requests)
        status.update([ready.process])

    assert stream.getvalue() == ""


def test_status_text_for_each_process_state(tmp_path: Path) -> None:
    def words(state: State, *tell: str, **numbers: int) -> str:
        told = Told(tmp_path, "decode-0", state)
        for doing in tell:
            told.reporter.tell(doing, **numbers)
        return what_it_does(told.process)

    assert words("planned") == "waits for its turn"
    assert words("starting") == "starting"
    assert words("starting", "compiling kernels (once)") == "compiling kernels (once)"
    assert words("ready", "serving", requests=2) == "serving 2 requests"
    assert words("stopping") == "stopping"
    assert words("stopping", "draining", requests=1) == "draining 1 request"
    restarting = Told(tmp_path, "decode-1", "exited").process
    restarting.returncode = -9
    restarting.waits(4.2)
    assert what_it_does(restarting) == "killed by SIGKILL; restarting in 4 s"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_a_terminal(decode: Told, tmp_path: Path, width: int) -> None:
    decode.reporter.tell("loading weights", percent=43)
    frontend = Told(tmp_path, "frontend", "starting")
    frontend.process.changed_at -= 90
    stream = io.StringIO()

    Console(file=stream, width=width).print(
        process_table([frontend.process, decode.process], time.monotonic() - 12)
    )

    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("up for 12 s")
    assert lines[1].split() == ["process", "pid", "state", "for", "what", "it", "does"]
    assert lines[2].split(maxsplit=4)[3:] == ["90s", "waits for a worker that registers the model"]
    assert "loading weights 43 %" in lines[3]
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (9e5, "10d")],
)
def test_a_long_time_is_shown_in_a_larger_unit(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


def test_on_a_narrow_terminal_names_and_states_are_whole(decode: Told, tmp_path: Path) -> None:
    restarting = Told(tmp_path, "prefill-10", "restarting").process
    restarting.returncode = -9
    stream = io.StringIO()

    Console(file=stream, width=40).print(process_table([restarting, decode.process], time.monotonic()))

    lines = stream.getvalue().splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [
        ["prefill-10", "restarting"],
        ["decode-0", "starting"],
    ]
    assert max(map(len, lines)) <= 40


class Lost(io.StringIO):
    """A stream of which each write fails while `error` is set."""

    def __init__(self, error: int, *, is_terminal: bool = False) -> None:
        super().__init__()
        self.error: int | None = error
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(text)

    def flush(self) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("error", [errno.EIO, errno.EPIPE, errno.ENOSPC])
@pytest.mark.parametrize("is_terminal", [False, True])
async def test_text_is_lost_while_the_stream_fails_and_nothing_is_raised(
    decode: Told, error: int, is_terminal: bool
) -> None:
    stream = Lost(error, is_terminal=is_terminal)
    status = status_for(stream)
    async with status.showing([decode.process]):
        status.note("lost")
        status.changed(decode.process)
    stream.error = None
    status.note("kept")
    assert "lost" not in stream.getvalue()
    assert "kept\n" in stream.getvalue()
