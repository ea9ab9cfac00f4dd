"""Starts, watches and stops the processes of a deployment. Restarts a dead process after a growing delay, until too
many starts have failed.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from trtllm_disagg.common.interpreter import environment
from trtllm_disagg.errors import ERROR_PREFIX
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.brokers import EventBroker
from trtllm_disagg.tools.up.http import answers, is_ready, lacks_model
from trtllm_disagg.tools.up.look import described
from trtllm_disagg.tools.up.managed_process import ManagedProcess, kill_all_marked
from trtllm_disagg.tools.up.orphan_reaper import MARK_VARIABLE, PROCESS_VARIABLE, start_reaper, stop_reaper
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
from trtllm_disagg.tools.up.ports import free_system_ports, give_back, is_free
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


class Supervisor:
    """Owns the processes from `load` to `kill`; the caller of `load` must call `kill`. One task per process, `_live`,
    starts it and waits for its end.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        specs: Sequence[ProcessSpec],
        run_dir: RunDir,
        status: Status,
        environ: Mapping[str, str] | None = None,
        kill_seconds: float = 5.0,
    ) -> None:
        """`environ`: of all processes; None: this one's. `kill_seconds`: wait for SIGKILL, since a process may wait for
        a device forever.
        """
        #: Of the current revision.
        self.config = config
        self.environ = environment() if environ is None else environ
        self._kill_seconds = kill_seconds
        self.run_dir = run_dir
        self._until_discovery_is_lost = run_dir.discovery_in_sight()
        self._events = EventBroker(run_dir.path)
        self._status = status
        self._mark = uuid.uuid4().hex
        self._reaper: subprocess.Popen[bytes] | None = None
        self.processes = [self._process_of(spec) for spec in specs]
        self._lives: dict[ManagedProcess, asyncio.Task[None]] = {}
        #: Kills what ended processes left behind.
        self._sweeps: dict[ManagedProcess, asyncio.Task[None]] = {}
        #: Why the deployment cannot continue.
        self._failure = asyncio.get_running_loop().create_future()
        #: Revision -> configuration of its workers, besides the current one.
        self.other_configs: dict[str, DeploymentConfig] = {}
        #: Set when a process changes its state.
        self.has_changed = asyncio.Event()
        self._is_loading = self._is_watched = False
        #: `processes.json` is outdated, because writing failed.
        self._is_outdated = False
        self._stopping = False
        self._is_gone = False
        #: Pids that survived SIGKILL.
        self._survivors: list[int] = []

    def _process_of(self, spec: ProcessSpec) -> ManagedProcess:
        return ManagedProcess(spec, self.run_dir.log(spec.name), backoff=self.config.backoff)

    async def load(self) -> None:
        """Starts all processes and waits until they can serve a request. Raises DeploymentFailedError when one dies or
        the startup timeout passes.
        """
        self._reaper = start_reaper(self._mark, self.environ)
        self._events.start()
        deadline = time.monotonic() + self.config.startup_seconds
        self._is_loading = True
        for is_first in (True, False):
            wave = [each for each in self.processes if (each.role in STARTED_FIRST) == is_first]
            for process in wave:
                self._begin(process)
            if not await first_completed(self._are_ready(wave), self._fails(), deadline - time.monotonic()):
                raise DeploymentFailedError(late_report(self.processes, self.config.startup_seconds))
        self._is_loading = False

    async def _are_ready(self, wave: Sequence[ManagedProcess]) -> bool:
        await asyncio.gather(*(process.was_ready.wait() for process in wave))
        return True

    async def _fails(self) -> None:
        """Never returns. Raises DeploymentFailedError."""
        await asyncio.shield(self._failure)

    async def watch(self) -> None:
        """Reports dead processes, and restarts them while the others serve. Never returns. Raises DeploymentFailedError
        when a frontend stays dead.
        """
        self._is_watched = True
        looking = asyncio.create_task(self._report_lost_discovery())
        try:
            await self._fails()
        finally:
            looking.cancel()

    async def _report_lost_discovery(self) -> None:
        """Processes watch the discovery store of their start, and miss a new one."""
        await self._until_discovery_is_lost()
        self.report_error(
            f"{self.run_dir.discovery} was removed or moved, so processes lose each other and requests fail; "
            "restart `up`"
        )

    # -- one process

    def add(self, spec: ProcessSpec) -> ManagedProcess:
        process = self._process_of(spec)
        self.processes.append(process)
        self._begin(process)
        return process

    def _begin(self, process: ManagedProcess) -> None:
        life = self._lives[process] = asyncio.create_task(self._live(process), name=process.name)
        life.add_done_callback(self.ends_with)

    def ends_with(self, task: asyncio.Task[None]) -> None:
        """Ends the deployment on an error of this task, even an unexpected one."""
        if not task.cancelled() and (error := task.exception()) and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # perhaps nothing waits for it any more

    async def _live(self, process: ManagedProcess) -> None:
        """Runs a process again and again until it is stopped, leaves or is given up, and its leftovers are gone."""
        try:
            await self._live_on(process)
        finally:
            await self._swept(process)
        self.changed(process)

    async def _live_on(self, process: ManagedProcess) -> None:
        deaths = process.deaths
        report = await self._run(process)
        while not (process.stop_requested.is_set() or self._stopping):
            if self._is_loading:
                raise DeploymentFailedError(report)
            is_optional = process.role not in ("frontend", "autoscale")
            if process.ended_well and process.ready_seconds is not None and is_optional:
                process.has_left = True
                alike = (each for each in self.processes if each.role == process.role)
                self.note(left_report(process, is_last=all(each.state == "exited" for each in alike)))
                break
            died_at = time.monotonic()
            deaths.count(process.ready_seconds, report)
            is_hopeless = deaths.is_hopeless and process.role not in STARTED_FIRST
            if is_hopeless or not (self.config.restart and self._is_watched):
                self._give_up(process, report, is_hopeless)
                break
            self.report_error(continued(report, f"restarting in {deaths.delay:g} s"))
            process.waits(deaths.delay)
            self.changed(process)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.stop_requested.wait(), deaths.delay)
                break
            await self._swept(process)
            process.spec = self._spec_of_now(process)
            report = await self._run(process, died_at)

    def config_of(self, revision: str | None) -> DeploymentConfig:
        """The configuration of a revision's workers; None: of other processes."""
        return self.other_configs.get(revision, self.config) if revision is not None else self.config

    def _spec_of_now(self, process: ManagedProcess) -> ProcessSpec:
        """The process with its revision's current settings, on its old port unless that is taken."""
        spec, config = process.spec, self.config_of(process.spec.revision)
        if spec.role not in NO_WORKERS and not all(is_free(LOOPBACK, port) for port in spec.ports.values()):
            (port,) = free_system_ports(1)
            spec = replace(spec, system_port=port)
        return same_again(spec, config, self.environ, (known.spec for known in self.processes))

    def _give_up(self, process: ManagedProcess, report: str, is_hopeless: bool) -> None:
        process.is_given_up = True
        if is_hopeless:
            report = given_up_report(process, report, process.deaths.failed_starts)
        if process.role == "frontend":
            raise DeploymentFailedError(report)
        self.report_error(f"{report}\nthe other processes serve on")

    async def _run(self, process: ManagedProcess, died_at: float | None = None) -> str:
        """Runs a process once. Returns the report of its end."""
        try:
            mark = await self._start(process)
        except OSError as error:
            return f"{process.name} cannot be started: {error}"
        ended = asyncio.create_task(process.wait())
        becomes_ready = asyncio.create_task(self._becomes_ready(process, died_at))
        late = ""
        try:
            seconds = None if self._is_loading else self.config.startup_seconds
            await asyncio.wait((ended, becomes_ready), timeout=seconds, return_when=FIRST_COMPLETED)
            if not (ended.done() or becomes_ready.done() or process.stop_requested.is_set()):
                late = late_report([process], self.config.startup_seconds)
                process.kill()
            if becomes_ready.done():
                becomes_ready.result()
            await ended
        finally:
            becomes_ready.cancel()
            ended.cancel()
            self._sweeps[process] = asyncio.create_task(self._sweep(process, mark))
        self.changed(process)
        return late or death_report(process, self._when(process))

    async def _sweep(self, process: ManagedProcess, mark: str) -> None:
        """Kills mpiexec's ranks: in their own sessions they would keep the GPUs from the next start."""
        await kill_all_marked(PROCESS_VARIABLE, mark, self._kill_seconds)
        process.is_swept = True

    async def _swept(self, process: ManagedProcess) -> None:
        if (sweep := self._sweeps.pop(process, None)) is not None:
            await sweep

    def _when(self, process: ManagedProcess) -> str:
        if process.ready_seconds is not None:
            return "while serving"
        return "before the deployment was ready" if self._is_loading else "before it was ready"

    async def _start(self, process: ManagedProcess) -> str:
        """Returns the mark of the process and its descendants."""
        mark = uuid.uuid4().hex
        inherited = {name: value for name, value in self.environ.items() if name not in PER_PROCESS_ENV}
        marks = {MARK_VARIABLE: self._mark, PROCESS_VARIABLE: mark}
        await process.start({**inherited, **process.spec.env, **marks})
        self.changed(process)
        return mark

    async def _becomes_ready(self, process: ManagedProcess, died_at: float | None) -> None:
        while not (await self._is_ready(process) and process.is_running):  # noqa: ASYNC110
            await asyncio.sleep(PROBE_SECONDS)
        process.became_ready()
        self.changed(process)
        if died_at is not None:
            away = time.monotonic() - died_at
            self.note(f"{process.name} is back (pid {process.pid}), {away:.1f} s after it died")

    async def _is_ready(self, process: ManagedProcess) -> bool:
        if await is_ready(process.spec, self.config):
            return await self._has_entered(process)
        # A restarted frontend lists no model until a worker registers one.
        first_stage = spec_of(self.config.strategy).kv_routed_roles
        is_served = any(each.role in first_stage and each.state == "ready" for each in self.processes)
        return process.restarts > 0 and not is_served and await answers(process.spec, self.config)

    async def _has_entered(self, process: ManagedProcess) -> bool:
        """A worker is healthy before it has registered and checked whether it may."""
        if process.role in NO_WORKERS or process.spec.system_port is None:
            return not await self._is_unknown(process)
        with suppress(OSError):
            answer = await described(process.spec.system_port)
            if answer is not None and not answer.description.registered:
                # It may run an older order, as a second stage that waits for its switch: no frontend will notice it.
                return answer.description.ready
            return (answer is None or answer.description.ready) and not await self._is_unknown(process)
        return False

    async def _is_unknown(self, process: ManagedProcess) -> bool:
        """It is to be the only first stage, and a serving frontend has not noticed it yet."""
        if process.role != spec_of(self.config.strategy).entry_role:
            return False
        serving = [each for each in self.processes if each.role == "frontend" and each.state == "ready"]
        return any([await lacks_model(each.spec, self.config) for each in serving])

    async def remove(self, process: ManagedProcess, seconds: float | None = None) -> None:
        """Stops a worker, by SIGTERM unless it leaves already, waits for its end for `seconds` at most (None:
        `stop_seconds`), and forgets it.
        """
        if not process.stop_requested.is_set():
            process.terminate()
        self.changed(process)
        await self._stopped(
            [process], self.config.stop_seconds if seconds is None else seconds, asyncio.Event()
        )
        await self.forget(process)

    async def forget(self, process: ManagedProcess) -> None:
        await self._until_killed([process])
        if not process.is_running and process in self.processes:  # otherwise it still has its ports and GPUs
            self._lives.pop(process, None)
            self.processes.remove(process)
            give_back(process.spec.ports.values())
        self._write()

    # -- all of them

    async def drain(self, hurry: asyncio.Event | None = None) -> bool:
        """Stops processes in the order of the request path, so requests can end. Returns whether none was killed."""
        return await self._stop(stop_order(self.config.strategy), self.config.stop_seconds, hurry)

    async def abandon(self, hurry: asyncio.Event | None = None) -> bool:
        """Stops all processes at once, without waiting for requests. Returns as `drain`."""
        together = [tuple(process.role for process in self.processes)]
        return await self._stop(together, min(ABANDON_SECONDS, self.config.stop_seconds), hurry)

    async def kill(self) -> None:
        """Kills all processes and their descendants, and frees the run directory."""
        if self._is_gone:
            return
        self._stopping = True
        try:
            await self._until_killed(self.processes)
            marked = await kill_all_marked(MARK_VARIABLE, self._mark, self._kill_seconds)
            # A process that hangs while it exits has lost its environment and so its mark.
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
                # Last, since the next deployment's sockets have the same names.
                self.run_dir.release()

    async def _until_killed(self, processes: Sequence[ManagedProcess]) -> None:
        for process in processes:
            process.stop_requested.set()
            process.kill()
        await self.over(processes, self._kill_seconds)

    def note(self, text: str) -> None:
        self._status.note(text)

    def report_error(self, report: str) -> None:
        self._status.note(f"\n{ERROR_PREFIX}{report}\n")

    async def _stop(
        self, waves: Iterable[Sequence[ProcessRole]], timeout: float, hurry: asyncio.Event | None
    ) -> bool:
        self._stopping = True
        hurry = hurry or asyncio.Event()
        deadline = time.monotonic() + timeout
        fair = min(timeout, max(FAIR_SECONDS, self.config.beyond_drain_seconds))
        running = [process for process in self.processes if process.is_running]
        for process in self.processes:
            process.stop_requested.set()
        for roles in waves:
            wave = [process for process in running if process.role in roles]
            # Even if one wave used up all time, the next one can shut down.
            for process in wave:
                process.terminate()
                self.changed(process)
            await self._stopped(wave, max(deadline - time.monotonic(), fair), hurry)
        await self.kill()
        return not self._survivors and all(process.ended_well for process in running)

    async def _stopped(self, wave: Sequence[ManagedProcess], timeout: float, hurry: asyncio.Event) -> None:
        began = time.monotonic()
        await first_completed(self.over(wave), hurry.wait(), timeout=timeout)
        leftovers = [process for process in wave if process.is_running]
        if names := ", ".join(process.name for process in leftovers):
            waited = time.monotonic() - began
            self.note(f"still running {waited:.1f} s after the signal to stop, killed: {names}")
        for process in leftovers:
            process.kill()

    async def over(self, processes: Iterable[ManagedProcess], timeout: float | None = None) -> None:
        """Waits until the processes' lives are over, or for `timeout` seconds."""
        if lives := [self._lives[process] for process in processes if process in self._lives]:
            await asyncio.wait(lives, timeout=timeout)

    def changed(self, process: ManagedProcess) -> None:
        self._write()
        self._status.changed(process)
        self.has_changed.set()

    def _write(self) -> None:
        try:
            self.run_dir.write(known.record() for known in self.processes if known.pid)
            self._is_outdated = False
        except OSError as error:
            # Other tools then read an old state, but a full disk must not stop the deployment.
            if not self._is_outdated:
                self._status.note(f"warning: {self.run_dir.processes_file} is out of date: {error}")
            self._is_outdated = True


async def first_completed(
    first: Coroutine[Any, Any, First], second: Coroutine[Any, Any, Second], timeout: float | None = None
) -> First | Second | None:
    """Returns the result of the first to end (the second one on a tie), or None after `timeout` seconds. Cancels the
    other one and waits for its end.
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
