"""How a worker leaves its deployment: it leaves discovery, waits for its running requests, and hands those that take
too long back to their frontends.

Dynamo's own shutdown waits 30 s at most, and then stops all requests in a way that looks to a handler like a client
that has disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from dynamo.common.utils.graceful_shutdown import get_grace_period_seconds

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.dynamo_runtime.handler import SMALLEST_REQUEST
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime
from trtllm_disagg.engine.capabilities import COUNTS_REQUESTS
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.health import EngineHealth, HealthTimes, until_stalled
from trtllm_disagg.errors import DisaggError, EngineLostError
from trtllm_disagg.handlers.cancellation import WorkerDrain, num_in_background
from trtllm_disagg.wire.bodies import decode_request

log = logging.getLogger(__name__)

#: Engines have no event for being idle, so they are polled.
_POLL_SECONDS = 0.05
#: For the removal from discovery. Behind a discovery that hangs, requests still end and the engine is closed.
_LEAVE_SECONDS = 5.0
#: Between two steps of an engine that reports fetched KV only during a step.
_STEP_SECONDS = 1.0
#: For the answer to the command of a flip: Dynamo drops the answers of a worker that has left discovery.
_ANSWER_SECONDS = 0.1
#: The part of the grace period without a request after which frontends count as knowing that this worker leaves.
_UNCALLED = 0.25
#: In which a call that was being sent has come, and is refused.
_SENT_SECONDS = 0.25


class Queue(Protocol):
    """The part of `prefill_queue.PrefillQueue` that is used here."""

    async def leave(self) -> None: ...

    async def drained(self) -> None: ...


class Leaving:
    def __init__(
        self,
        runtime: Runtime,
        drain: WorkerDrain,
        engine: Engine,
        queue: Queue,
        drain_seconds: float,
        leave_seconds: float = _LEAVE_SECONDS,
    ) -> None:
        self._runtime = runtime
        self._drain = drain
        self._engine = engine
        self._queue = queue
        self._drain_seconds = drain_seconds
        self._leave_seconds = leave_seconds
        self._leaving: asyncio.Task[None] | None = None
        #: The role in which this worker serves next; None: it ends.
        self.flips_to: Role | None = None
        self._is_quiet = asyncio.Event()

    async def leave_when(self, told_to_stop: asyncio.Event) -> None:
        """A frontend may still send requests in the grace period after that."""
        await told_to_stop.wait()
        self.leave("SIGTERM or SIGINT", get_grace_period_seconds())

    def leave(self, reason: str, grace_seconds: float = 0.0, *, with_namespace: bool = False) -> None:
        """Begin to leave for good, unless this worker already does. Ends with the runtime's shutdown.
        `with_namespace`: all workers of it leave.
        """
        self.flips_to = None
        self._begin(reason, grace_seconds, with_namespace=with_namespace)

    def flip(self, to: Role) -> None:
        """Begin to leave in order to serve in another role; a `leave` that comes meanwhile prevails. Raises
        WorkerLeavingError when this worker leaves already.
        """
        if self._leaving is not None:
            raise self._drain.error()
        self.flips_to = to
        self._begin(f"it becomes a {to} worker", get_grace_period_seconds())

    def _begin(self, reason: str, grace_seconds: float, *, with_namespace: bool = False) -> None:
        if self._leaving is None:
            self._drain.begin(reason)
            leave = self._leave(reason, grace_seconds, with_namespace)
            self._leaving = asyncio.create_task(leave, name="leaving")

    async def finish(self, seconds: float) -> int:
        """Leave on a command, which is answered when the requests have ended, or after `seconds`. Returns how many of
        them still run.
        """
        if self._leaving is None:
            self._drain_seconds = seconds
        self.leave("a command", get_grace_period_seconds(), with_namespace=True)
        await self._is_quiet.wait()
        return self._drain.num_running

    async def _until_uncalled(self, grace_seconds: float) -> None:
        """Wait until callers know that this worker has left: for the grace period, or until no request has come for a
        part of it. A request that comes later finds no worker, and is sent to another one.
        """
        now = quiet_since = began = time.monotonic()
        seen = self._drain.num_entered
        while now - began < grace_seconds and now - quiet_since < grace_seconds * _UNCALLED:
            await asyncio.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if seen != (seen := self._drain.num_entered):
                quiet_since = now

    async def _leave(self, reason: str, grace_seconds: float, with_namespace: bool) -> None:
        log.info("leaving: %s", reason)
        try:
            await asyncio.sleep(0 if self.flips_to is None else _ANSWER_SECONDS)
            is_over = time.monotonic() + grace_seconds
            await self._leave_place(self._queue.leave())
            if grace_seconds:
                if await self._hide(with_namespace):
                    await self._until_uncalled(grace_seconds)
                else:
                    self._drain.refuses = True
                    await asyncio.sleep(min(grace_seconds, _SENT_SECONDS))
            await self._leave_place(self._runtime.leave())
            if self.flips_to is None:
                await asyncio.sleep(is_over - time.monotonic())
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(_SENT_SECONDS):
                        await self._runtime.open_namespace()
            await self._wait_until_quiet()
            self._is_quiet.set()
            await self._drain.cut()
        finally:
            self._runtime.shutdown()

    async def _hide(self, with_namespace: bool) -> bool:
        """False for a second stage, which refuses calls before it leaves discovery: a caller drops one that it is just
        sending then, and the KV of a prefill would wait for the end of its lease.
        """
        try:
            async with asyncio.timeout(self._leave_seconds):
                return await self._runtime.hide(with_namespace=with_namespace)
        except Exception as error:
            log.error("frontends cannot be told that this worker leaves: %r", error)
            return True

    async def _leave_place(self, leaving: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._leave_seconds):
                await leaving
        except TimeoutError:
            log.error("leaving discovery or the prefill queue took more than %g s", self._leave_seconds)
        except Exception as error:
            log.error("leaving discovery or the prefill queue failed: %r", error)

    async def _wait_until_quiet(self) -> None:
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._until_quiet()
        except TimeoutError:
            log.warning(
                "%d requests still run after %g s: they are handed back to their frontends; the KV of %d handoffs may "
                "still be read",
                self._drain.num_running,
                self._drain_seconds,
                self._engine.handoffs.count(),
            )
        except Exception as error:
            log.warning("the engine cannot be asked whether it is idle: %s", error)

    async def _until_quiet(self) -> None:
        """Wait until no request runs or is relayed, and no KV is held that a decode worker may still read."""
        await self._queue.drained()
        await self._drain.none_runs()
        stepping = asyncio.create_task(self._step(), name="steps")
        try:
            engine = self._engine
            while engine.death is None and (num_in_background() or not await engine.is_idle()):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            stepping.cancel()

    async def _step(self) -> None:
        """TensorRT-LLM reports only in its next step that decode has fetched KV, and takes no step without a request.
        So it gets a small request each second while KV may be held, if it sends statistics.
        """
        engine = self._engine
        while COUNTS_REQUESTS not in engine.capabilities:
            if engine.handoffs.has_statistics and engine.handoffs.count():
                with contextlib.suppress(DisaggError):
                    await engine.probe(decode_request(SMALLEST_REQUEST))
            await asyncio.sleep(_STEP_SECONDS)


async def _watch_for_stalls(engine: Engine, health: EngineHealth, seconds: float) -> None:
    if seconds:
        reason = await until_stalled(engine, seconds)
        log.error("the engine is stalled: %s", reason)
        health.declare_dead(reason)


@contextlib.asynccontextmanager
async def leave_when_dead(
    engine: Engine, leaving: Leaving, times: HealthTimes, stall_seconds: float
) -> AsyncIterator[None]:
    """Leave the deployment when the engine has died. EngineLostError ends the block then, whatever else has failed."""
    health = EngineHealth(engine, lambda reason: leaving.leave("its engine died"), times)
    health.start()
    stalls = asyncio.create_task(_watch_for_stalls(engine, health, stall_seconds), name="stalls")
    try:
        yield
    except Exception as error:
        if engine.death is None:
            raise
        log.info("a step of this worker failed after its engine's death: %s", error)
    finally:
        stalls.cancel()
        health.stop()
    if engine.death is not None:
        raise EngineLostError(f"the engine died: {engine.death}")


_POLL_DISCOVERY_SECONDS = 1.0
#: Dynamo's file discovery drops a process that has not touched its files for 10 s.
_LONG_SECONDS = 5.0
_RETRY_SECONDS = 5.0


def _clock() -> float:
    """A clock that also counts the time in which the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def keep_in_discovery(
    renew: Callable[[], Awaitable[None]],
    renew_if_lost: Callable[[], Awaitable[None]],
    clock: Callable[[], float] = _clock,
    poll_seconds: float = _POLL_DISCOVERY_SECONDS,
    retry_seconds: float = _RETRY_SECONDS,
) -> None:
    """Never returns. Has a worker enter file discovery again, which drops the files of a process that could not touch
    them: on a file system that could not be written, or in a freeze (SIGSTOP, a paused machine), after which some of
    its files may be gone and others not.
    """
    was_frozen = False
    while True:
        before = clock()
        await asyncio.sleep(poll_seconds)
        if (frozen := clock() - before - poll_seconds) >= _LONG_SECONDS:
            log.warning("this worker was frozen for %.0f s: it enters discovery again", frozen)
            was_frozen = True
        try:
            await (renew if was_frozen else renew_if_lost)()
            was_frozen = False
        except Exception as error:
            log.warning(
                "entering discovery again failed: %s; the next attempt is in %g s", error, retry_seconds
            )
            await asyncio.sleep(retry_seconds)
