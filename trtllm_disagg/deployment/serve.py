"""`up` from start to end: load, say that it is ready, serve until asked to stop, drain."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace

from trtllm_disagg.deployment.errors import DeploymentFailedError
from trtllm_disagg.deployment.first_of import first_of
from trtllm_disagg.deployment.limits import look_at_limits
from trtllm_disagg.deployment.orders import taking_orders
from trtllm_disagg.deployment.plan import DeploymentConfig, num_system_ports, plan
from trtllm_disagg.deployment.ports import free_http_port, free_system_ports
from trtllm_disagg.deployment.run_dir import RunDir
from trtllm_disagg.deployment.status import Status
from trtllm_disagg.deployment.supervisor import Supervisor


def prepare(config: DeploymentConfig, status: Status) -> Supervisor:
    """Checks the machine's limits and the port, claims the run directory, plans the processes. Nothing runs yet."""
    for doubt in look_at_limits([config]):
        status.note(f"warning: {doubt}")
    http_port = free_http_port(config.http_host, config.http_port)
    run_dir = RunDir.claim(config.run_dir, status.note)
    config = replace(config, http_port=http_port, run_dir=run_dir.path)
    specs = plan(config, system_ports=free_system_ports(num_system_ports(config)), environ=os.environ)
    return Supervisor(config, specs, run_dir, status)


async def serve(config: DeploymentConfig, status: Status) -> int:
    """The exit code: 0 after a clean stop, 1 when the deployment failed or a process had to be killed, 130 (SIGINT) or
    another 128 + signal number when it was stopped before it was ready.
    """
    supervisor = prepare(config, status)
    status.note(f"run directory: {supervisor.config.run_dir}")
    async with status.showing(supervisor.processes):
        return await _serve(supervisor, status)


async def _serve(supervisor: Supervisor, status: Status) -> int:
    with Interrupts().listening() as interrupts:
        try:
            was_ready = await interrupts.allow(supervisor.load())
            if was_ready:
                print(supervisor.config.ready_line, flush=True)
                async with taking_orders(supervisor):
                    await interrupts.allow(supervisor.watch())
            status.note("stopping; interrupt again to kill at once")
            all_obeyed = await supervisor.drain(interrupts.hurry)
            return int(not all_obeyed) if was_ready else interrupts.exit_code
        except DeploymentFailedError as error:
            supervisor.tell_error(str(error))
            await supervisor.abandon(interrupts.hurry)
            return 1
        finally:
            await supervisor.kill()


#: `timeout`, for one, signals its child and then its whole process group: two signals, one wish.
ONE_INTERRUPT_SECONDS = 0.3


class Interrupts:
    """The first SIGINT, SIGTERM or SIGHUP asks to stop, the next one to hurry."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._first_at = 0.0
        #: Of a process that ends because of the first one.
        self.exit_code = 0

    @contextmanager
    def listening(self) -> Iterator[Interrupts]:
        loop = asyncio.get_running_loop()
        numbers = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _wanted(number)]
        for number in numbers:
            loop.add_signal_handler(number, self._interrupted, number)
        try:
            yield self
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def allow(self, work: Coroutine[None, None, None]) -> bool:
        """Does `work` until its end or the first interrupt. Whether nobody interrupted."""
        interrupted = await first_of(work, self.stop.wait())
        return not interrupted

    def _interrupted(self, number: int) -> None:
        now = time.monotonic()
        if not self.stop.is_set():
            self._first_at = now
            self.exit_code = 128 + number
            self.stop.set()
        elif now - self._first_at > ONE_INTERRUPT_SECONDS:
            self.hurry.set()


def _wanted(number: signal.Signals) -> bool:
    # nohup ignores SIGHUP on purpose.
    return number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
