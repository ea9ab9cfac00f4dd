"""A process that died is started again, after a delay that grows, until too many starts have failed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from trtllm_disagg.deployment.managed_process import ManagedProcess
from trtllm_disagg.deployment.plan import (
    LOOPBACK,
    NO_WORKERS,
    Backoff,
    DeploymentConfig,
    DeploymentFailedError,
    ProcessSpec,
    same_again,
)
from trtllm_disagg.deployment.ports import free_system_ports, is_free
from trtllm_disagg.deployment.status import continued, death_report, given_up_report


class Deaths:
    """The deaths of one process: how long its next start waits, and when it gets none."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._in_a_row = 0
        self.failed_starts = 0

    def count(self, ready_seconds: float | None) -> None:
        """One more. `ready_seconds`: how long it had been ready, None when it never was."""
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
        """Before the next start."""
        doublings = min(self._in_a_row - 1, 30)
        return min(self._backoff.first * 2.0**doublings, self._backoff.most)


class Owner(Protocol):
    """`Supervisor`, as far as it is used here."""

    config: DeploymentConfig

    @property
    def processes(self) -> Sequence[ManagedProcess]: ...

    async def bring_up(self, process: ManagedProcess) -> None: ...

    def changed(self, process: ManagedProcess) -> None: ...

    def note(self, text: str) -> None: ...

    def tell_error(self, report: str) -> None: ...


class Restarts:
    """Each process by itself, so that one that waits holds up none of the others."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._deaths: dict[ManagedProcess, Deaths] = {}
        self._tasks: dict[ManagedProcess, asyncio.Task[None]] = {}

    async def after(self, deaths: asyncio.Queue[ManagedProcess]) -> None:
        """Starts again what comes out of the queue. Returns never; a frontend that stays dead is a
        DeploymentFailedError. When this is cancelled, nothing is started any more.
        """
        try:
            async with asyncio.TaskGroup() as restarts:
                while True:
                    process = await deaths.get()
                    self._tasks[process] = restarts.create_task(self._after(process))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def forget(self, process: ManagedProcess) -> None:
        """It gets no other start."""
        self._deaths.pop(process, None)
        if task := self._tasks.pop(process, None):
            task.cancel()
            await asyncio.wait((task,))

    async def _after(self, process: ManagedProcess) -> None:
        report = death_report(process, "while serving")
        if process.ended_well and process.role != "frontend":
            self._owner.note(f"{process.name} was told to stop, though not by this `up`, and has left")
        elif self._owner.config.restart:
            await self._until_ready(process, report)
        else:
            self._bury(process, report)

    async def _until_ready(self, process: ManagedProcess, report: str) -> None:
        died_at = time.monotonic()
        deaths = self._deaths.setdefault(process, Deaths(self._owner.config.backoff))
        deaths.count(process.ready_seconds)
        while not deaths.is_hopeless:
            self._owner.tell_error(continued(report, f"it starts again in {deaths.delay:g} s"))
            process.waits(deaths.delay)
            self._owner.changed(process)
            await asyncio.sleep(deaths.delay)
            process.spec = self._spec_of_now(process)
            try:
                await self._owner.bring_up(process)
            except DeploymentFailedError as error:
                report = str(error)
                deaths.count(None)
            else:
                away = time.monotonic() - died_at
                self._owner.note(f"{process.name} is back (pid {process.pid}), {away:.1f} s after it died")
                return
        self._bury(process, given_up_report(process, report, deaths.failed_starts))

    def _bury(self, process: ManagedProcess, report: str) -> None:
        if process.role == "frontend":
            raise DeploymentFailedError(report)
        self._owner.tell_error(f"{report}\nthe other processes serve on")

    def _spec_of_now(self, process: ManagedProcess) -> ProcessSpec:
        """With today's strategy and thresholds; on its old port, unless another program has taken that."""
        spec, config = process.spec, self._owner.config
        if spec.role not in NO_WORKERS and not all(is_free(LOOPBACK, port) for port in spec.ports.values()):
            (port,) = free_system_ports(1)
            spec = replace(spec, system_port=port)
        return same_again(spec, config, os.environ, (known.spec for known in self._owner.processes))
