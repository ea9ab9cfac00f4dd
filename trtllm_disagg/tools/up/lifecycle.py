"""A deployment as a context manager, for tests and tools: it runs inside the block and is gone after it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from trtllm_disagg import INSTALL_DYNAMO
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes import machine
from trtllm_disagg.processes.exits import EXIT_CODES, ONE_INTERRUPT_SECONDS, ExitCode, is_wanted
from trtllm_disagg.processes.interpreter import environment, python
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

_AGAIN_SECONDS = 30.0


def prepare(config: DeploymentConfig, status: Status) -> Supervisor:
    """Check for Dynamo and the engine, the machine's limits and the port, plan the processes, and claim the run
    directory. Starts no process.
    """
    if find_spec("dynamo") is None:
        raise ConfigError(f"frontend and workers need Dynamo, which is not installed here: {INSTALL_DYNAMO}")
    environ = environment()
    for shortage in check_deployment_limits([config]):
        status.note(f"warning: {shortage}")
    http_port = free_http_port(config.http_host, config.http_port)
    config = replace(config, http_port=http_port, run_dir=config.run_dir.absolute())
    config = with_workers(config, environ)
    specs = plan(config, system_ports=free_system_ports(num_system_ports(config)), environ=environ)
    # Last, because it removes the traces of the deployment before.
    run_dir = RunDir.claim(config.run_dir, status.note)
    return Supervisor(config, specs, run_dir, status, environ)


def check_deployment_limits(configs: Iterable[DeploymentConfig]) -> list[str]:
    """`check_limits` for deployments that run side by side."""
    return machine.check_limits(sum(map(needs_of, configs), machine.Needs()))


async def serve(config: DeploymentConfig, status: Status) -> ExitCode:
    """Run `up` to its end. Returns 0 after a clean stop, 1 when the deployment failed or a process had to be killed,
    and 128 + signal number (130 for SIGINT) when it was stopped before it was ready.
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
                # Commands must be served before the line is printed: a reader may send one at once.
                async with serving_commands(supervisor), autoscaling(supervisor):
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


@asynccontextmanager
async def autoscaling(supervisor: Supervisor) -> AsyncIterator[None]:
    """Inside the block `trtllm-disagg autoscale` runs, where it is wanted. It sends commands as any client does, and
    ends by itself when this process is killed.
    """
    keeping = asyncio.create_task(_autoscale(supervisor)) if supervisor.config.autoscale else None
    try:
        yield
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait((keeping,))


async def _autoscale(supervisor: Supervisor) -> None:
    """Never returns: an `autoscale` that ends is started again."""
    run_dir = supervisor.config.run_dir
    argv = python("-m", "trtllm_disagg", "autoscale", "--run-dir", str(run_dir), *supervisor.config.autoscale)
    while True:
        with (run_dir / "autoscale.log").open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *argv, env=supervisor.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            code = await child.wait()
        finally:
            if child.returncode is None:
                child.terminate()
                await child.wait()
        supervisor.note(
            f"autoscale has ended ({code}, see autoscale.log): it starts again in {_AGAIN_SECONDS:g} s"
        )
        await asyncio.sleep(_AGAIN_SECONDS)


class Interrupts:
    """The first SIGINT, SIGTERM or SIGHUP sets `stop`, the next one `hurry`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._first_at = 0.0
        #: For a process that ends because of the first signal.
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
                # After a signal this process ends, and a late one must not end it before it has removed its files.
                signal.signal(number, signal.SIG_IGN if self.stop.is_set() else handler)

    async def allow(self, work: Coroutine[None, None, None]) -> bool:
        """Run `work` until its end or the first interrupt. Returns False when it was interrupted."""
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
    """A deployment that is ready. `config` has the port and the run directory in use."""

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
        """The processes of `role`, each with its `pid`, `log`, `state` and `spec.system_port`."""
        return [process for process in self.processes if process.role == role]


@asynccontextmanager
async def running_deployment(
    config: DeploymentConfig, status: Status | None = None
) -> AsyncIterator[Deployment]:
    """A deployment that is ready when the block begins, and drained or killed when it ends.

    Raises DeploymentFailedError with a readable report when the deployment does not become ready.
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
            async with serving_commands(supervisor), autoscaling(supervisor):
                yield Deployment(supervisor)
        finally:
            async with status.showing(supervisor.processes):
                await supervisor.drain()
    finally:
        await supervisor.kill()


@contextmanager
def deployment_in_background(config: DeploymentConfig, status: Status | None = None) -> Iterator[Deployment]:
    """`running_deployment` in a thread, for callers without an event loop, such as a session fixture of pytest."""
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
