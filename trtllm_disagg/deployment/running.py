"""A deployment as a context manager, for tests and tools: it runs inside the block and is gone after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from trtllm_disagg.deployment.errors import DeploymentFailedError
from trtllm_disagg.deployment.orders import taking_orders
from trtllm_disagg.deployment.plan import DeploymentConfig, Role
from trtllm_disagg.deployment.process import ManagedProcess
from trtllm_disagg.deployment.serve import prepare
from trtllm_disagg.deployment.status import SilentStatus, Status
from trtllm_disagg.deployment.supervisor import Supervisor


class Deployment:
    """A deployment that can serve. `config` has the port and run directory that were really taken."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @property
    def config(self) -> DeploymentConfig:
        return self._supervisor.config

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """Those of now: workers come and go."""
        return tuple(self._supervisor.processes)

    @property
    def base_url(self) -> str:
        return self.config.base_url

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    def of_role(self, role: Role) -> list[ManagedProcess]:
        """The processes of `role`, each with its `pid`, `log`, `state` and `spec.system_port`."""
        return [process for process in self.processes if process.role == role]


@asynccontextmanager
async def running_deployment(
    config: DeploymentConfig, status: Status | None = None
) -> AsyncIterator[Deployment]:
    """Ready when the block begins, drained or killed when it ends, however it ends.

    Raises `DeploymentFailedError` with a readable report when the deployment does not come up.
    """
    status = status or SilentStatus()
    supervisor = prepare(config, status)
    try:
        async with status.showing(supervisor.processes):
            await _load(supervisor)
        try:
            async with taking_orders(supervisor):
                yield Deployment(supervisor)
        finally:
            await supervisor.drain()
    finally:
        await supervisor.kill()


@contextmanager
def deployment_in_background(config: DeploymentConfig, status: Status | None = None) -> Iterator[Deployment]:
    """The same without an event loop of one's own, as a session fixture of pytest needs it."""
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


async def _load(supervisor: Supervisor) -> None:
    try:
        await supervisor.load()
    except DeploymentFailedError:
        await supervisor.abandon()
        raise


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
