"""Starts, watches and stops the processes of a deployment. A process that died is started again, after a growing delay,
until too many starts have failed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from trtllm_disagg.errors import ERROR_PREFIX
from trtllm_disagg.processes.interpreter import environment
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.brokers import EventBroker
from trtllm_disagg.tools.up.http import answers, is_ready, lacks_model
from trtllm_disagg.tools.up.managed_process import Deaths, ManagedProcess, kill_all_marked
from trtllm_disagg.tools.up.orphan_reaper import (
    MARK_VARIABLE,
    PROCESS_VARIABLE,
    start_reaper,
    stop_reaper,
)
from trtllm_disagg.tools.up.plan import (
    LOOPBACK,
    NO_WORKERS,
    PER_PROCESS_ENV,
    STARTED_FIRST,
    DeploymentConfig,
    DeploymentFailedError,
    ProcessRole,
    ProcessSpec,
    same_again,
    stop_order,
)
from trtllm_disagg.tools.up.ports import free_system_ports, is_free
from trtllm_disagg.tools.up.run_dir import RunDir
from trtllm_disagg.tools.up.status import (
    Status,
    continued,
    death_report,
    given_up_report,
    late_report,
    left_report,
)

First = TypeVar("First")
Second = TypeVar("Second")

PROBE_SECONDS, ABANDON_SECONDS, FAIR_SECONDS = 0.1, 5.0, 3.0


class Restarts:
    """Starts dead processes again, each in its own task, so that they do not wait for each other."""

    def __init__(self, owner: Supervisor) -> None:
        self._owner = owner
        self._deaths: dict[ManagedProcess, Deaths] = {}
        self._tasks: dict[ManagedProcess, asyncio.Task[None]] = {}

    async def after(self, deaths: asyncio.Queue[ManagedProcess]) -> None:
        """Start again each process in the queue, until cancelled. Never returns. Raises DeploymentFailedError when a
        frontend stays dead.
        """
        try:
            async with asyncio.TaskGroup() as restarts:
                while True:
                    process = await deaths.get()
                    if self._owner.is_outdated(process):
                        await self._owner.remove(process)
                        self._owner.note(f"{process.name} has left, with its revision")
                    elif self._owner.keeps(process):
                        self._tasks[process] = restarts.create_task(self._after(process))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def forget(self, process: ManagedProcess) -> None:
        """Never start this process again."""
        self._deaths.pop(process, None)
        # Waiting for a task that is done would let `after` make another one meanwhile.
        if (task := self._tasks.pop(process, None)) and not task.done():
            task.cancel()
            await asyncio.wait((task,))

    async def _after(self, process: ManagedProcess) -> None:
        report = death_report(process, "while serving")
        if process.ended_well and process.role != "frontend":
            alike = (each for each in self._owner.processes if each.role == process.role)
            is_last = all(each.state == "exited" for each in alike)
            self._owner.note(left_report(process, is_last=is_last))
        elif self._owner.config.restart:
            await self._until_ready(process, report)
        else:
            self._give_up(process, report)

    async def _until_ready(self, process: ManagedProcess, report: str) -> None:
        died_at = time.monotonic()
        deaths = self._deaths.setdefault(process, Deaths(self._owner.config.backoff))
        deaths.count(process.ready_seconds)
        # A process that all others need at their start is never given up.
        while (process.role in STARTED_FIRST or not deaths.is_hopeless) and not process.is_running:
            self._owner.report_error(continued(report, f"it starts again in {deaths.delay:g} s"))
            process.waits(deaths.delay)
            self._owner.changed(process)
            await asyncio.sleep(deaths.delay)
            await self._owner.swept(process)
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
        self._give_up(process, given_up_report(process, report, deaths.failed_starts))

    def _give_up(self, process: ManagedProcess, report: str) -> None:
        if process.role == "frontend":
            raise DeploymentFailedError(report)
        self._owner.report_error(f"{report}\nthe other processes serve on")

    def _spec_of_now(self, process: ManagedProcess) -> ProcessSpec:
        """The process with the current strategy and thresholds, on its old port unless another program uses that."""
        spec, config = process.spec, self._owner.config
        if spec.role not in NO_WORKERS and not all(is_free(LOOPBACK, port) for port in spec.ports.values()):
            (port,) = free_system_ports(1)
            spec = replace(spec, system_port=port)
        return same_again(spec, config, os.environ, (known.spec for known in self._owner.processes))


class Supervisor:
    """Owns the processes from `load` to `kill`. The caller of `load` must call `kill` in every case."""

    def __init__(
        self,
        config: DeploymentConfig,
        specs: Sequence[ProcessSpec],
        run_dir: RunDir,
        status: Status,
        kill_seconds: float = 5.0,
    ) -> None:
        """`kill_seconds`: for SIGKILL to end a process. The kernel may keep one for ever that waits for a device."""
        self.config = config
        self._kill_seconds = kill_seconds
        self.processes = [ManagedProcess(spec, run_dir.log(spec.name)) for spec in specs]
        self._run_dir = run_dir
        self._until_discovery_is_lost = run_dir.discovery_in_sight()
        self._events = EventBroker(run_dir.path)
        self._status = status
        self._mark = uuid.uuid4().hex
        self._reaper: subprocess.Popen[bytes] | None = None
        self._watchers: dict[ManagedProcess, asyncio.Task[None]] = {}
        self._deaths: asyncio.Queue[ManagedProcess] = asyncio.Queue()
        #: The task that starts or stops these processes reports their end.
        self._starting_or_stopping: set[ManagedProcess] = set()
        self._restarts = Restarts(self)
        #: `processes.json` is out of date because it could not be written.
        self._is_outdated = False
        self._stopping = False
        self._is_gone = False
        #: Pids that SIGKILL has not ended.
        self._survivors: list[int] = []

    async def load(self) -> None:
        """Start all processes and wait until they can serve a request.

        Raises DeploymentFailedError when one dies, or the startup timeout passes.
        """
        self._reaper = start_reaper(self._mark, environment())
        self._events.start()
        deadline = time.monotonic() + self.config.startup_seconds
        for is_first in (True, False):
            wave = [each for each in self.processes if (each.role in STARTED_FIRST) == is_first]
            await self._load_wave(wave, deadline)

    async def _load_wave(self, wave: Sequence[ManagedProcess], deadline: float) -> None:
        for process in wave:
            await self._start(process)
        timeout = deadline - time.monotonic()
        outcome = await first_completed(self._all_ready(wave), self._deaths.get(), timeout)
        if isinstance(outcome, ManagedProcess):
            raise DeploymentFailedError(death_report(outcome, "before the deployment was ready"))
        if outcome is None:
            raise DeploymentFailedError(late_report(self.processes, self.config.startup_seconds))

    async def watch(self) -> None:
        """Report processes that die, and start them again while the others serve on. Never returns. Raises
        DeploymentFailedError when a frontend stays dead.
        """
        looking = asyncio.create_task(self._report_lost_discovery())
        try:
            await self._restarts.after(self._deaths)
        finally:
            looking.cancel()

    async def _report_lost_discovery(self) -> None:
        """Each process watches the discovery store that was there when it started, and hears of no other one."""
        await self._until_discovery_is_lost()
        self.report_error(
            f"{self._run_dir.discovery} was removed or moved: frontend and workers lose each other, and requests fail; "
            "stop this `up`, and start it again"
        )

    async def add(self, spec: ProcessSpec) -> ManagedProcess:
        """Start one more worker, and wait until it is ready. Raises DeploymentFailedError when it dies or is late; then
        it is removed, and the others serve on.
        """
        process = ManagedProcess(spec, self._run_dir.log(spec.name))
        self.processes.append(process)
        try:
            await self.bring_up(process)
        except BaseException:
            await self._forget(process)
            raise
        return process

    async def bring_up(self, process: ManagedProcess) -> None:
        """Start a process and wait until it is ready. Raises DeploymentFailedError, after ending it, if it is not."""
        self._starting_or_stopping.add(process)
        try:
            await self._start(process)
            seconds = self.config.startup_seconds
            await first_completed(self._becomes_ready(process), self._gone([process]), seconds)
            if process.is_running and process.state != "ready":
                late = late_report([process], seconds)
                await self._until_killed([process])
                raise DeploymentFailedError(late)
            if not process.is_running:
                raise DeploymentFailedError(death_report(process, "before it was ready"))
        finally:
            self._starting_or_stopping.discard(process)

    def is_outdated(self, process: ManagedProcess) -> bool:
        """A worker of another revision than the current one."""
        return process.spec.revision not in (None, self.config.revision)

    def keeps(self, process: ManagedProcess) -> bool:
        """It is to run: it may have been removed between its death and this question."""
        return process in self.processes and process not in self._starting_or_stopping

    async def swept(self, process: ManagedProcess) -> None:
        """Wait until what a dead process has left behind is gone, or given up."""
        await asyncio.wait((self._watchers[process],))

    async def remove(self, process: ManagedProcess) -> bool:
        """Stop one worker when its requests have ended, and forget it. Returns whether it ended by itself."""
        await self._restarts.forget(process)
        self._starting_or_stopping.add(process)
        await self._stop_wave([process], self.config.stop_seconds, asyncio.Event())
        await self._forget(process)
        return not process.is_running and process.ended_well

    async def _forget(self, process: ManagedProcess) -> None:
        self._starting_or_stopping.add(process)
        await self._until_killed([process])
        if not process.is_running:  # else it still has its ports and GPUs
            self._watchers.pop(process, None)
            self.processes.remove(process)
            self._starting_or_stopping.discard(process)
        self._write()

    async def drain(self, hurry: asyncio.Event | None = None) -> bool:
        """Stop in the order of the request path, so that running requests can end. Returns whether none was killed."""
        return await self._stop(stop_order(self.config.strategy), self.config.stop_seconds, hurry)

    async def abandon(self, hurry: asyncio.Event | None = None) -> bool:
        """Stop all processes at once, without waiting for requests. Returns as `drain`."""
        together = [tuple(process.role for process in self.processes)]
        return await self._stop(together, min(ABANDON_SECONDS, self.config.stop_seconds), hurry)

    async def kill(self) -> None:
        """Kill all processes that still run, and all their descendants; the run directory is free then."""
        if self._is_gone:
            return
        self._stopping = True
        try:
            await self._until_killed(self.processes)
            marked = await kill_all_marked(MARK_VARIABLE, self._mark, self._kill_seconds)
            # One that hangs while it exits has no environment any more in which a mark could be.
            hanging = (process.pid for process in self.processes if process.is_running)
            self._survivors = sorted({*marked, *hanging})
            if self._survivors:
                pids = ", ".join(map(str, self._survivors))
                self.note(
                    f"warning: SIGKILL has not ended these processes, which may wait for a GPU or a disk: pid {pids}"
                )
            self._write()
        finally:
            self._is_gone = True
            try:
                self._events.close()
                if self._reaper is not None:
                    stop_reaper(self._reaper)
            finally:
                # Last: the sockets of the next deployment have the same names.
                self._run_dir.release()

    async def _until_killed(self, processes: Sequence[ManagedProcess]) -> None:
        for process in processes:
            process.kill()
        if watchers := [self._watchers[process] for process in processes if process in self._watchers]:
            await asyncio.wait(watchers, timeout=self._kill_seconds)

    async def _start(self, process: ManagedProcess) -> None:
        mark = uuid.uuid4().hex
        try:
            inherited = {name: value for name, value in environment().items() if name not in PER_PROCESS_ENV}
            marks = {MARK_VARIABLE: self._mark, PROCESS_VARIABLE: mark}
            await process.start({**inherited, **process.spec.env, **marks})
        except OSError as error:
            raise DeploymentFailedError(f"{process.name} cannot be started: {error}") from error
        self._watchers[process] = asyncio.create_task(self._reap(process, mark))
        self.changed(process)

    def note(self, text: str) -> None:
        self._status.note(text)

    def report_error(self, report: str) -> None:
        self._status.note(f"\n{ERROR_PREFIX}{report}\n")

    async def _reap(self, process: ManagedProcess, mark: str) -> None:
        await process.wait()
        try:
            if not self._stopping and process not in self._starting_or_stopping:
                self._deaths.put_nowait(process)
            self.changed(process)
        finally:
            # The ranks of mpiexec have sessions of their own, and would keep the GPUs from the next start.
            await kill_all_marked(PROCESS_VARIABLE, mark, self._kill_seconds)
            process.is_swept = True

    async def _all_ready(self, wave: Sequence[ManagedProcess]) -> bool:
        await asyncio.gather(*(self._becomes_ready(process) for process in wave))
        return True

    async def _becomes_ready(self, process: ManagedProcess) -> None:
        while True:
            if await self._is_ready(process) and process.is_running:
                process.became_ready()
                return self.changed(process)
            await asyncio.sleep(PROBE_SECONDS)

    async def _is_ready(self, process: ManagedProcess) -> bool:
        if await is_ready(process.spec, self.config):
            return not await self._is_unknown(process)
        # A restarted frontend lists no model while no worker is there that registers one.
        first_stage = spec_of(self.config.strategy).kv_routed_roles
        is_served = any(each.role in first_stage and each.state == "ready" for each in self.processes)
        return process.restarts > 0 and not is_served and await answers(process.spec, self.config)

    async def _is_unknown(self, process: ManagedProcess) -> bool:
        """It is to be the only first stage, and a frontend that serves has not noticed it yet."""
        if process.role != spec_of(self.config.strategy).entry_role:
            return False
        serving = [each for each in self.processes if each.role == "frontend" and each.state == "ready"]
        return any([await lacks_model(each.spec, self.config) for each in serving])

    async def _stop(
        self, waves: Iterable[Sequence[ProcessRole]], timeout: float, hurry: asyncio.Event | None
    ) -> bool:
        self._stopping = True
        hurry = hurry or asyncio.Event()
        deadline = time.monotonic() + timeout
        fair = min(timeout, max(FAIR_SECONDS, self.config.beyond_drain_seconds))
        running = [process for process in self.processes if process.is_running]
        for roles in waves:
            wave = [process for process in running if process.role in roles]
            # Even after a wave that used up all of it, the next one can shut down.
            await self._stop_wave(wave, max(deadline - time.monotonic(), fair), hurry)
        await self.kill()
        return not self._survivors and all(process.ended_well for process in running)

    async def _stop_wave(self, wave: Sequence[ManagedProcess], timeout: float, hurry: asyncio.Event) -> None:
        began = time.monotonic()
        for process in wave:
            process.terminate()
            self.changed(process)
        await first_completed(self._gone(wave), hurry.wait(), timeout=timeout)
        leftovers = [process for process in wave if process.is_running]
        if names := ", ".join(process.name for process in leftovers):
            waited = time.monotonic() - began
            self.note(f"still running {waited:.1f} s after the order to stop, killed: {names}")
        for process in leftovers:
            process.kill()

    async def _gone(self, processes: Iterable[ManagedProcess]) -> None:
        await asyncio.gather(*(asyncio.shield(self._watchers[process]) for process in processes))

    def changed(self, process: ManagedProcess) -> None:
        self._write()
        self._status.changed(process)

    def _write(self) -> None:
        try:
            self._run_dir.write(known.record() for known in self.processes if known.pid)
            self._is_outdated = False
        except OSError as error:
            # Other tools then read an old state, but a full disk is no reason to stop serving.
            if not self._is_outdated:
                self._status.note(f"warning: {self._run_dir.processes_file} is out of date: {error}")
            self._is_outdated = True


async def first_completed(
    first: Coroutine[Any, Any, First], second: Coroutine[Any, Any, Second], timeout: float | None = None
) -> First | Second | None:
    """The result of the one that ends first, the second one when both did; None after `timeout` seconds.

    The other one is cancelled, and over, before this returns.
    """
    a, b = asyncio.create_task(first), asyncio.create_task(second)
    try:
        await asyncio.wait((a, b), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        a.cancel()
        b.cancel()
        await asyncio.gather(a, b, return_exceptions=True)
    if not b.cancelled():
        return b.result()
    return None if a.cancelled() else a.result()
