"""What `up` shows of its processes, on a terminal and without one, and what it reports of one that died."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.clock import Clock
from trtllm_disagg.common.reports import ACTIVITY_VARIABLE, Reporter
from trtllm_disagg.tools.up.managed_process import Deaths, ManagedProcess, State
from trtllm_disagg.tools.up.plan import Backoff, ProcessRole, ProcessSpec
from trtllm_disagg.tools.up.status import (
    SILENCE_SECONDS,
    PlainStatus,
    age,
    cause_in,
    continued,
    death_report,
    late_report,
    process_table,
    status_for,
    what_it_does,
)


class Told:
    """A process that does not run, and what its worker would tell."""

    def __init__(self, directory: Path, name: str, state: State) -> None:
        file = directory / f"{name}.activity"
        role: ProcessRole = "frontend" if name == "frontend" else "decode"
        spec = ProcessSpec(name, role, ("true",), {ACTIVITY_VARIABLE: str(file)})
        self.process = ManagedProcess(spec, directory / f"{name}.log")
        self.process.state = state
        self.reporter = Reporter(file)


@pytest.fixture
def decode(tmp_path: Path) -> Told:
    return Told(tmp_path, "decode-0", "starting")


def test_without_a_terminal_each_activity_is_one_line_and_a_silence_ends_after_10_s(
    decode: Told, tmp_path: Path
) -> None:
    clock, stream = Clock(50.0), io.StringIO()
    status = PlainStatus(stream, clock)
    frontend, ready = Told(tmp_path, "frontend", "starting"), Told(tmp_path, "decode-1", "ready")
    processes = [frontend.process, decode.process, ready.process]
    # A percentage that grows is no line of its own, and nothing is written of a process that serves.
    for doing, percent in (("loading weights", 1), ("loading weights", 43), ("warming up", None)):
        clock.now += 1
        decode.reporter.report(doing, percent=percent)
        ready.reporter.report("serving", requests=percent)
        status.update(processes)
    for seconds in (SILENCE_SECONDS - 0.1, 0.1):
        clock.now += seconds
        status.update(processes)
    assert stream.getvalue().splitlines() == [
        "[   1.0s] frontend pid=0 starting",
        "[   1.0s] decode-0 pid=0 starting: loading weights",
        "[   3.0s] decode-0 pid=0 starting: warming up",
        "[  13.0s] waiting for frontend (waits for a worker to register the model), decode-0 (warming up)",
    ]


def test_status_text_for_each_process_state(tmp_path: Path) -> None:
    def words(state: State, *report: str, **numbers: int) -> str:
        told = Told(tmp_path, "decode-0", state)
        for doing in report:
            told.reporter.report(doing, **numbers)
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


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_fits_a_terminal_with_names_and_states_whole(
    decode: Told, tmp_path: Path, width: int
) -> None:
    decode.reporter.report("loading weights", percent=43)
    frontend = Told(tmp_path, "frontend", "starting").process
    restarting = Told(tmp_path, "prefill-10", "restarting").process
    frontend.changed_at -= 90
    restarting.returncode = -9
    stream = io.StringIO()
    table = process_table([frontend, restarting, decode.process], time.monotonic() - 12)
    Console(file=stream, width=width).print(table)
    title, _, *rows = stream.getvalue().splitlines()
    assert title.startswith("up for 12 s")
    shown = (("frontend", "starting"), ("prefill-10", "restarting"), ("decode-0", "starting"))
    for row, names in zip(rows, shown, strict=True):
        assert set(names) <= set(row.split())
    if width > 40:
        assert rows[0].split(maxsplit=4)[3:] == ["90s", "waits for a worker to register the model"]
        assert "loading weights 43 %" in rows[2]
    assert max(map(len, rows)) <= width
    times = {0.2: "0s", 119: "119s", 120: "2m", 7199: "119m", 7200: "2h", 9e5: "10d"}
    assert {seconds: age(seconds) for seconds in times} == times


class Lost(io.StringIO):
    """A stream of which each write fails while `error` is set."""

    def __init__(self, error: int, *, is_terminal: bool = False) -> None:
        super().__init__()
        self.error: int | None = error
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.flush()
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


OURS = "error: model: toy holds no *.safetensors file"
NOISE = "2026-11-22T00:27:52.98Z  INFO dynamo_runtime::runtime: Runtime shutdown initiated"
DYNAMO = "2026-11-22T00:33:33.25Z ERROR main.parse_args: Unknown arguments specified: ['--nonsense']"
PYTHON = "ValueError: no such thing"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([NOISE, OURS, NOISE], "model: toy holds no *.safetensors file"),
        ([OURS, PYTHON, DYNAMO, NOISE], "model: toy holds no *.safetensors file"),
        (["Traceback (most recent call last):", "  raise ValueError", PYTHON, NOISE], PYTHON),
        (["pkg.errors.OddError: x"], "pkg.errors.OddError: x"),
        ([NOISE, DYNAMO, NOISE], "Unknown arguments specified: ['--nonsense']"),
        ([NOISE, "an error: in a sentence"], None),
        ([DYNAMO, *[NOISE] * 5], None),
        ([], None),
    ],
)
def test_death_cause_is_found_in_any_line(lines: Sequence[str], cause: str | None) -> None:
    assert cause_in(lines) == cause


async def run(process: ManagedProcess, script: str) -> ManagedProcess:
    process.spec = ProcessSpec("decode-0", "decode", (sys.executable, "-S", "-c", script))
    await process.start({})
    async with asyncio.timeout(30):
        await process.wait()
    return process


async def test_report_begins_with_the_cause_and_ends_with_the_log_of_the_last_start(decode: Told) -> None:
    decode.process.log.write_text("of an earlier deployment\n" * 1000)
    process = await run(decode.process, f"print({OURS!r}); print('x' * 999); raise SystemExit(2)")
    sentence, where, *tail = death_report(process, "while serving").split("\n")
    assert sentence.startswith(
        f"decode-0 died while serving: model: toy holds no *.safetensors file (exit code 2), pid {process.pid}, "
    )
    assert (where, tail) == (f"last lines of {process.log}:", [f"  {OURS}", f"  {'x' * 237}..."])
    assert continued(f"{sentence}\n{where}", "then").split("\n") == [f"{sentence}; then", where]

    await run(process, "print('second')")
    assert process.last_lines(10) == ["second"]
    marker = process.log.read_text().splitlines()[-2]
    assert marker.startswith("--- started again at ")
    assert marker.endswith(", after: exit code 2 ---")


async def test_report_has_no_lines_of_dynamos_start_and_names_a_full_disk(
    decode: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        f"print(20 * {NOISE + chr(10)!r} + {OURS!r}); print(20 * {NOISE + chr(10)!r}); raise SystemExit(2)"
    )
    process = await run(decode.process, script)
    sentence, _, *tail = death_report(process, "while serving").split("\n")
    assert (tail, "disk" in sentence) == ([f"  {OURS}"], False)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Namespace(free=4096))
    full = f"the disk of {process.log.parent} is full"
    assert full in death_report(process, "while serving").split("\n")[0]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"import os; print({DYNAMO!r}, flush=True); os.kill(os.getpid(), 9)", "killed by SIGKILL, pid"),
        (
            "print('watch: Too many open files (os error 24)'); raise SystemExit(1)",
            "sudo sysctl fs.inotify.max_user_instances=1024",
        ),
    ],
    ids=["killed", "inotify"],
)
async def test_report_names_the_signal_and_a_limit_that_helps(decode: Told, script: str, words: str) -> None:
    report = death_report(await run(decode.process, script), "while serving")
    assert words in report.split("\n")[0]


UNSERVED = (
    "2026-11-27T11:39:12.205527Z  WARN dynamo_llm::discovery::controller: Model materialization failed; scheduling "
    'retry group=["toy","[\\"dynamo\\"]"] attempt=1 retry_ms=1000 '
    'error="prompt_formatter_from_mdc: chat_template is required"'
)


@pytest.mark.parametrize("name", ["frontend", "decode-0"])
def test_late_frontend_is_reported_with_the_reason_that_it_logged(tmp_path: Path, name: str) -> None:
    process = Told(tmp_path, name, "starting").process
    process.log.write_text(f"{NOISE}\n{UNSERVED}\n{NOISE}\n")
    first, line = late_report([process], 25).split("\n")
    reason = "cannot serve the model: prompt_formatter_from_mdc: chat_template is required"
    assert (f"frontend ({reason})" in first) == (name == "frontend")
    assert line.endswith(NOISE)


@pytest.mark.parametrize(
    ("ready", "delays"),
    [([10.0, *[None] * 6], [1, 2, 4, 8, 16, 30, 30]), ([5.0, 59.0, 60.0, 5.0], [1, 2, 1, 2])],
    ids=["double up to the longest", "anew after the steady time only"],
)
def test_delays_before_the_next_start(ready: list[float | None], delays: list[float]) -> None:
    deaths = Deaths(Backoff(steady=60.0))
    for seconds, delay in zip(ready, delays, strict=True):
        deaths.count(seconds, "")
        assert deaths.delay == delay


def test_only_consecutive_failed_starts_end_restarts() -> None:
    deaths = Deaths(Backoff(attempts=2))
    for seconds in (5.0, None, 5.0, None):
        deaths.count(seconds, "")
    assert not deaths.is_hopeless
    deaths.count(None, "")
    assert deaths.is_hopeless
