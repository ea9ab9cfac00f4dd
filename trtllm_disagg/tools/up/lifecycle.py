"""A deployment as a context manager, for tests and tools: it runs inside the block."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from trtllm_disagg import INSTALL_DYNAMO
from trtllm_disagg.common import machine
from trtllm_disagg.common.exits import EXIT_CODES, ONE_INTERRUPT_SECONDS, ExitCode, is_wanted
from trtllm_disagg.common.interpreter import environment
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.command_socket import serving_commands
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import (
    DeploymentConfig,
    DeploymentFailedError,
    ProcessRole,
    num_system_ports,
    plan,
)
from trtllm_disagg.tools.up.ports import free_http_port, free_system_ports
from trtllm_disagg.tools.up.run_dir import RunDir
from trtllm_disagg.tools.up.status import Status
from trtllm_disagg.tools.up.supervisor import Supervisor, first_completed
from trtllm_disagg.tools.up.workers import needs_of, with_workers


def prepare(config: DeploymentConfig, status: Status) -> Supervisor:
    """Checks Dynamo, the engine, limits and the port, plans the processes, and claims the run directory. Starts
    nothing.
    """
    if find_spec("dynamo") is None:
        raise ConfigError(f"frontend and workers need Dynamo, which is not installed: {INSTALL_DYNAMO}")
    environ = environment()
    for shortage in machine.check_limits(needs_of(config)):
        status.note(f"warning: {shortage}")
    http_port = free_http_port(config.http_host, config.http_port)
    config = replace(config, http_port=http_port, run_dir=config.run_dir.absolute())
    config = with_workers(config, environ)
    specs = plan(config, system_ports=free_system_ports(num_system_ports(config)), environ=environ)
    # Last, because it removes the earlier deployment's traces.
    run_dir = RunDir.claim(config.run_dir, status.note)
    return Supervisor(config, specs, run_dir, status, environ)


async def serve(config: DeploymentConfig, status: Status) -> ExitCode:
    """Runs `up` to its end. Returns 0 after a clean stop, 1 when the deployment failed or a process had to be killed,
    and 128 + signal number (130 for SIGINT) when stopped before it was ready.
    """
    supervisor = prepare(config, status)
    status.note(f"run directory: {supervisor.config.run_dir}")
    async with status.showing(supervisor.processes):
        return await _serve(supervisor, status)


async def _serve(supervisor: Supervisor, status: Status) -> ExitCode:
    with Interrupts().listening() as interrupts:
        try:
            was_ready = await interrupts.allow(supervisor.load())
            if was_ready:
                # Commands must work before the line is printed: a reader may send one at once.
                async with serving_commands(supervisor):
                    print(supervisor.config.ready_line, flush=True)
                    await interrupts.allow(supervisor.watch())
            status.note("stopping; interrupt again to kill at once")
            all_obeyed = await supervisor.drain(interrupts.hurry)
            if not was_ready:
                return interrupts.exit_code
            return ExitCode.DONE if all_obeyed else ExitCode.FAILED
        except DeploymentFailedError as error:
            supervisor.report_error(str(error))
            await supervisor.abandon(interrupts.hurry)
            return ExitCode.FAILED
        finally:
            await supervisor.kill()


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP: the first one sets `stop`, the next one `hurry`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._first_at = 0.0
        #: Of the first signal.
        self.exit_code = ExitCode.DONE

    @contextmanager
    def listening(self) -> Iterator[Interrupts]:
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in EXIT_CODES if is_wanted(number)}
        for number in before:
            loop.add_signal_handler(number, self._interrupted, number)
        try:
            yield self
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                # This process ends now; a late signal must not stop it from removing its files.
                signal.signal(number, signal.SIG_IGN if self.stop.is_set() else handler)

    async def allow(self, work: Coroutine[None, None, None]) -> bool:
        """Runs `work` until its end or the first interrupt. Returns False if interrupted."""
        interrupted = await first_completed(work, self.stop.wait())
        return not interrupted

    def _interrupted(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self.stop.is_set():
            self._first_at = now
            self.exit_code = EXIT_CODES[number]
            self.stop.set()
        elif now - self._first_at > ONE_INTERRUPT_SECONDS:
            self.hurry.set()


class Deployment:
    """A ready deployment. `config` has the actual port and run directory."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @property
    def config(self) -> DeploymentConfig:
        return self._supervisor.config

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        return tuple(self._supervisor.processes)

    @property
    def base_url(self) -> str:
        return self.config.base_url

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    def of_role(self, role: ProcessRole) -> list[ManagedProcess]:
        """Processes of `role`, each with `pid`, `log`, `state` and `spec.system_port`."""
        return [process for process in self.processes if process.role == role]


@asynccontextmanager
async def running_deployment(
    config: DeploymentConfig, status: Status | None = None
) -> AsyncIterator[Deployment]:
    """A deployment that is ready inside the block, and drained or killed at its end. Raises DeploymentFailedError, with
    a readable report, if it does not become ready.
    """
    status = status or Status()
    supervisor = prepare(config, status)
    try:
        async with status.showing(supervisor.processes):
            try:
                await supervisor.load()
            except DeploymentFailedError:
                await supervisor.abandon()
                raise
        try:
            async with serving_commands(supervisor):
                yield Deployment(supervisor)
        finally:
            async with status.showing(supervisor.processes):
                await supervisor.drain()
    finally:
        await supervisor.kill()


@contextmanager
def deployment_in_background(config: DeploymentConfig, status: Status | None = None) -> Iterator[Deployment]:
    """`running_deployment` in a thread, for callers without an event loop, such as pytest fixtures."""
    ready: Future[Deployment] = Future()
    loop = asyncio.new_event_loop()
    keeping = loop.create_task(_keep(running_deployment(config, status), ready))
    thread = threading.Thread(target=_run, args=(loop, keeping), name="deployment")
    thread.start()
    try:
        yield ready.result()
    finally:
        loop.call_soon_threadsafe(keeping.cancel)
        thread.join()
        loop.close()


async def _keep(deployment: AbstractAsyncContextManager[Deployment], ready: Future[Deployment]) -> None:
    try:
        async with deployment as running:
            ready.set_result(running)
            await asyncio.Event().wait()
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)


def _run(loop: asyncio.AbstractEventLoop, keeping: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(keeping)
    loop.run_until_complete(loop.shutdown_default_executor())
