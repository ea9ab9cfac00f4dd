"""How a worker leaves its deployment: no request is sent to it any more, what runs is waited for, the rest goes on
elsewhere.

Dynamo's own shutdown waits 30 s at most, and then stops all requests in a way that looks to a handler as if their
clients had left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from dynamo.common.utils.graceful_shutdown import get_grace_period_seconds

from trtllm_disagg.dynamo_runtime.handler import SMALLEST_REQUEST
from trtllm_disagg.engine.capabilities import COUNTS_REQUESTS
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import DisaggError
from trtllm_disagg.handlers.cancellation import num_in_background
from trtllm_disagg.handlers.drain import WorkerDrain
from trtllm_disagg.wire.bodies import decode_request

log = logging.getLogger(__name__)

#: Engines offer no event for what is waited for here.
_POLL_SECONDS = 0.05
#: Between two steps of an engine that tells in steps only.
_STEP_SECONDS = 1.0


class Place(Protocol):
    """`runtime.Runtime`, as far as it is used here."""

    async def leave(self) -> None: ...

    def shutdown(self) -> None: ...


class Queue(Protocol):
    """`prefill_queue.PrefillQueue`, as far as it is used here."""

    async def leave(self) -> None: ...

    async def drained(self) -> None: ...


class Leaving:
    def __init__(
        self, place: Place, drain: WorkerDrain, engine: Engine, queue: Queue, drain_seconds: float
    ) -> None:
        self._place = place
        self._drain = drain
        self._engine = engine
        self._queue = queue
        self._drain_seconds = drain_seconds
        self._leaving: asyncio.Task[None] | None = None

    def leave_on_signals(self) -> None:
        """SIGTERM and SIGINT. A frontend may not have heard yet when it sends the next request, so there is a grace
        period before anything is looked at.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave, "it was told to stop", get_grace_period_seconds())

    def leave(self, reason: str, grace_seconds: float = 0.0) -> None:
        """Begin, for the first reason that there is. The runtime is shut down at the end of it."""
        if self._leaving is None:
            self._drain.begin(reason)
            self._leaving = asyncio.create_task(self._leave(reason, grace_seconds), name="leaving")

    async def _leave(self, reason: str, grace_seconds: float) -> None:
        log.info("leaving: %s", reason)
        try:
            await self._leave_discovery()
            await asyncio.sleep(grace_seconds)
            await self._wait_until_quiet()
            await self._drain.cut()
        finally:
            self._place.shutdown()

    async def _leave_discovery(self) -> None:
        for outcome in await asyncio.gather(self._queue.leave(), self._place.leave(), return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("not everything could be left: %r", outcome)

    async def _wait_until_quiet(self) -> None:
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._all_quiet()
        except TimeoutError:
            log.warning(
                "%d requests still run after %g s: they are handed back to their frontends; the KV of %d handoffs may "
                "still be read",
                self._drain.num_running,
                self._drain_seconds,
                self._engine.handoffs.count(),
            )
        except Exception as error:
            log.warning("whether all is quiet cannot be told: %s", error)

    async def _all_quiet(self) -> None:
        """No request runs or is relayed, and no KV is held for another worker, so that none is read from a dead one."""
        await self._queue.drained()
        await self._drain.none_runs()
        stepping = asyncio.create_task(self._step(), name="steps")
        try:
            while self._engine.death is None and not await self._is_quiet():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            stepping.cancel()

    async def _step(self) -> None:
        """TensorRT-LLM takes no step without a request, and tells in its next one only that decode has fetched KV. So
        it gets a small one each second while KV may be held, if it tells of steps.
        """
        engine = self._engine
        while COUNTS_REQUESTS not in engine.capabilities:
            if engine.handoffs.is_told and engine.handoffs.count():
                with contextlib.suppress(DisaggError):
                    await engine.probe(decode_request(SMALLEST_REQUEST))
            await asyncio.sleep(_STEP_SECONDS)

    async def _is_quiet(self) -> bool:
        return num_in_background() == 0 and await self._engine.is_idle()


_FREEZE_POLL_SECONDS = 1.0
#: Dynamo's file discovery forgets a process that has not touched its files for 10 s.
_LONG_SECONDS = 5.0


def _clock() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def watch_for_freezes(
    thaw: Callable[[], Awaitable[None]],
    clock: Callable[[], float] = _clock,
    poll_seconds: float = _FREEZE_POLL_SECONDS,
) -> None:
    """Returns never. Calls `thaw` after each freeze (SIGSTOP, a paused machine) that may look dead to discovery."""
    while True:
        before = clock()
        await asyncio.sleep(poll_seconds)
        frozen = clock() - before - poll_seconds
        if frozen < _LONG_SECONDS:
            continue
        log.warning("this worker was frozen for %.0f s: it tells discovery again that it is there", frozen)
        try:
            await thaw()
        except Exception:
            log.exception("discovery cannot be told; if no request comes to this worker, start it again")
