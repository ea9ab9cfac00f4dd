"""One process of a deployment: its state, log, end and next start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.machine import birth
from trtllm_disagg.common.reports import ACTIVITY_VARIABLE, Activity, read_activity
from trtllm_disagg.tools.up.orphan_reaper import kill_marked
from trtllm_disagg.tools.up.plan import Backoff, ProcessRole, ProcessSpec
from trtllm_disagg.tools.up.run_dir import (
    MAX_LOG_BYTES,
    ProcessRecord,
    forget_predecessor,
    move_to_predecessor,
)

State = Literal["planned", "starting", "ready", "stopping", "exited", "restarting"]

TAIL_BYTES = 64 * 1024
#: Time between two checks of the log's size.
LOOK_SECONDS = 5.0
_SWEEP_SECONDS = 0.1
ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Deaths:
    """Counts the deaths of a process, which set the delay of its next start and when it is given up."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._in_a_row = 0
        self.failed_starts = 0
        #: Report of the last death.
        self.last = ""

    def count(self, ready_seconds: float | None, report: str) -> None:
        """Counts a death. `ready_seconds`: time it had been ready; None: never."""
        self.last = report
        if ready_seconds is None:
            self.failed_starts += 1
        else:
            self.failed_starts = 0
            if ready_seconds >= self._backoff.steady:
                self._in_a_row = 0
        self._in_a_row += 1

    @property
    def is_hopeless(self) -> bool:
        return self.failed_starts >= self._backoff.attempts

    @property
    def delay(self) -> float:
        """Seconds until the next start."""
        doublings = min(self._in_a_row - 1, 30)
        return min(self._backoff.first * 2.0**doublings, self._backoff.max_delay)


class ManagedProcess:
    """A process in its own session, so that Ctrl-C in the terminal reaches only `up`."""

    def __init__(
        self,
        spec: ProcessSpec,
        log: Path,
        max_log_bytes: int = MAX_LOG_BYTES,
        look_seconds: float = LOOK_SECONDS,
        backoff: Backoff | None = None,
    ) -> None:
        self.spec = spec
        self.log = log
        self._max_log_bytes = max_log_bytes
        self._look_seconds = look_seconds
        self.state: State = "planned"
        self.returncode: int | None = None
        self.started_at = self.changed_at = time.monotonic()
        self.restarts = 0
        #: `up` stops it. Otherwise it starts again when it dies.
        self.stop_requested = asyncio.Event()
        self.deaths = Deaths(backoff or Backoff())
        #: Set once it was ready for the first time.
        self.was_ready = asyncio.Event()
        #: It died too often to be restarted.
        self.is_given_up = False
        #: Another program stopped it.
        self.has_left = False
        #: Its leftovers are gone, or given up.
        self.is_swept = True
        #: Time of the next start, in state `restarting`.
        self.restart_at = 0.0
        self._ready_at: float | None = None
        self._ended_at: float | None = None
        self._log_start = 0
        self._born = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def role(self) -> ProcessRole:
        return self.spec.role

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self.returncode is None

    @property
    def is_over(self) -> bool:
        """It has ended for good."""
        return self.stop_requested.is_set() and not self.is_running and self.state != "restarting"

    @property
    def holds_gpus(self) -> bool:
        """Its GPUs are in use: it or a rank runs or drains, or it starts again."""
        return self.is_running or self.state == "restarting" or not self.is_swept

    @property
    def elapsed(self) -> float:
        """Seconds since its last start, until now or its end."""
        return (self._ended_at or time.monotonic()) - self.started_at

    @property
    def ready_seconds(self) -> float | None:
        """Seconds that it has been ready since its last start; None: never."""
        if self._ready_at is None:
            return None
        return (self._ended_at or time.monotonic()) - self._ready_at

    @property
    def ended_well(self) -> bool:
        """It never ran, exited with 0, or ended by SIGTERM."""
        return self.returncode in (None, 0, ExitCode.TERMINATED, -signal.SIGTERM)

    @property
    def was_killed(self) -> bool:
        return self.returncode is not None and self.returncode < 0

    @property
    def activity(self) -> Activity:
        """Its reported activity; empty without reports."""
        file = self._activity_file
        return Activity() if file is None else read_activity(file)

    @property
    def _activity_file(self) -> Path | None:
        file = self.spec.env.get(ACTIVITY_VARIABLE)
        return Path(file) if file else None

    async def start(self, env: Mapping[str, str]) -> None:
        """Starts the process. A restart continues the log after a line that says so."""
        if (activity := self._activity_file) is not None:
            activity.unlink(missing_ok=True)
        with self.log.open("ab", buffering=0) as log:
            if self._process is None:
                log.truncate(0)
                forget_predecessor(self.log)
            else:
                now = datetime.now().astimezone().isoformat(timespec="seconds")
                with contextlib.suppress(OSError):  # on a full disk, run without this line
                    log.write(f"--- started again at {now}, after: {self.describe_end()} ---\n".encode())
                self.restarts += 1
            # After `truncate`, the position is still at the old end.
            self._log_start = log.seek(0, os.SEEK_END)
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        self.started_at = time.monotonic()
        self.returncode = self._ready_at = self._ended_at = None
        self.is_swept = False
        self._born = birth(self.pid)
        self._become("starting")

    async def wait(self) -> None:
        """Waits for the end, keeps the log short meanwhile, and kills what remains in its session."""
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while not (await asyncio.wait((ended,), timeout=self._look_seconds))[0]:
                await self._keep_log_short()
        finally:
            # No effect unless this wait was cancelled.
            ended.cancel()
        self.returncode = ended.result()
        self._ended_at = time.monotonic()
        self._become("exited")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _keep_log_short(self) -> None:
        # On a full disk, the log stays as it is.
        with contextlib.suppress(OSError):
            if await asyncio.to_thread(move_to_predecessor, self.log, self._max_log_bytes):
                self._log_start = 0

    def became_ready(self) -> None:
        self.was_ready.set()
        self._ready_at = time.monotonic()
        self._become("ready")

    def waits(self, seconds: float) -> None:
        """The process has ended, and starts again after `seconds`."""
        self.restart_at = time.monotonic() + seconds
        self._become("restarting")

    def leaves(self) -> None:
        """The process ends after its requests, as asked."""
        self.stop_requested.set()
        if self.is_running:
            self._become("stopping")

    def terminate(self) -> None:
        self.leaves()
        if self.is_running and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Kills the process now, or cancels its next start."""
        if self.state == "restarting":
            self._become("exited")
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _become(self, state: State) -> None:
        self.state = state
        self.changed_at = time.monotonic()

    def describe_end(self) -> str:
        if self.returncode is None:
            return "still running"
        if self.returncode < 0:
            return f"killed by {signal.Signals(-self.returncode).name}"
        return f"exit code {self.returncode}"

    def last_lines(self, count: int) -> list[str]:
        """The last `count` nonempty lines since its last start, without colours."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        lines = (ESCAPE_SEQUENCE.sub("", line).rstrip() for line in text.splitlines())
        return [line for line in lines if line][-count:]

    def record(self) -> ProcessRecord:
        return ProcessRecord(
            name=self.name,
            role=self.role,
            pid=self.pid,
            ports=self.spec.ports,
            log=str(self.log),
            state=self.state,
            born=self._born,
        )


async def kill_all_marked(variable: str, mark: str, seconds: float) -> list[int]:
    """Kills all processes with `mark`, also new ones. Returns the pids that SIGKILL has not ended within `seconds`."""
    deadline = time.monotonic() + seconds
    # The end of another process's child sends no event.
    while (left := await asyncio.to_thread(kill_marked, mark, variable)) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_SWEEP_SECONDS)
    return left
