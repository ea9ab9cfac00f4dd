"""One running process of a deployment: its state, its log, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from trtllm_disagg.deployment.plan import ProcessSpec, Role
from trtllm_disagg.deployment.run_dir import ProcessRecord, birth

State = Literal["planned", "starting", "ready", "stopping", "exited"]

TAIL_BYTES = 16 * 1024
ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class ManagedProcess:
    """A process in its own session, so that a Ctrl-C in the terminal reaches only `up`."""

    def __init__(self, spec: ProcessSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.state: State = "planned"
        self.returncode: int | None = None
        self.started_at = time.monotonic()
        self._born = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def role(self) -> Role:
        return self.spec.role

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self.returncode is None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def ended_well(self) -> bool:
        """It never ran, said goodbye itself, or obeyed a SIGTERM before it had a handler for it."""
        return self.returncode in (None, 0, -signal.SIGTERM)

    async def start(self, env: Mapping[str, str]) -> None:
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        self.started_at = time.monotonic()
        self._born = birth(self.pid)
        self.state = "starting"

    async def wait(self) -> None:
        """Until it is over and reaped. What it started itself and left behind in its session goes with it."""
        assert self._process is not None
        self.returncode = await self._process.wait()
        self.state = "exited"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        if self.is_running and self._process is not None:
            self.state = "stopping"
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def describe_end(self) -> str:
        if self.returncode is None:
            return "still running"
        if self.returncode < 0:
            return f"killed by {signal.Signals(-self.returncode).name}"
        return f"exit code {self.returncode}"

    def last_lines(self, count: int) -> list[str]:
        """The last `count` lines of the log that say something, without colours."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - TAIL_BYTES))
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
