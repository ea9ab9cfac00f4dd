"""Makes a worker leave its deployment, for every reason: it leaves discovery, waits for its requests, and gives those
that take too long back to their frontends. Dynamo's own shutdown would stop them after 30 s as if their clients had
disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from trtllm_disagg.dynamo_runtime.handler import SMALLEST_REQUEST
from trtllm_disagg.dynamo_runtime.registration import Registration
from trtllm_disagg.engine.capabilities import COUNTS_REQUESTS
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import DisaggError, WorkerLeavingError
from trtllm_disagg.handlers.drain import WorkerDrain, num_in_background
from trtllm_disagg.prefill_queue import WorkerQueue
from trtllm_disagg.wire.bodies import decode_request
from trtllm_disagg.worker.life import Action, Event, Life

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds between polls: engines have no event for being idle.
_POLL_SECONDS = 0.05
#: For leaving discovery. Even if discovery hangs, requests end and the engine is closed.
_LEAVE_SECONDS = 5.0
#: Between two steps of an engine that reports fetched KV only during a step.
_STEP_SECONDS = 1.0
#: For a command's answer: Dynamo drops the answers of an unlisted worker.
_ANSWER_SECONDS = 0.1
#: After this share of the grace period without a request, frontends count as knowing that this worker leaves.
_UNCALLED = 0.25
#: Time for calls in flight to arrive, and to be refused.
_SENT_SECONDS = 0.25


@dataclass(eq=False)
class Leaving:
    life: Life
    place: Registration
    drain: WorkerDrain
    engine: Engine
    queue: WorkerQueue
    drain_seconds: float
    leave_seconds: float = _LEAVE_SECONDS
    others_stay: bool = False
    #: No request runs, or the drain is over.
    is_drained: asyncio.Event = field(default_factory=asyncio.Event)
    #: Why the last drain failed or exceeded its limit.
    waits_for: str | None = None

    async def finish(self, seconds: float, *, others_stay: bool = False) -> int:
        """Leave on a command. Returns the number of requests that still run after `seconds`; 0 as soon as none does."""
        if self.life.command(Event.FINISH) is Action.LEAVE:
            self.drain_seconds, self.others_stay = seconds, others_stay
        await self.is_drained.wait()
        return self.drain.num_running

    @property
    def is_paused(self) -> bool:
        """Paused and drained: no request needs this worker."""
        return self.life.reason.pauses and self.is_drained.is_set()

    def resume(self) -> None:
        """Begin the next role term in the same role. Raises WorkerLeavingError if this worker is not paused."""
        if not self.is_paused:
            raise WorkerLeavingError(f"this worker is not drained by a pause: it is {self.life.state.value}")
        self.life.command(Event.RESUME)

    async def run(self) -> None:
        """From unlisted to over."""
        life, place, reason = self.life, self.place, self.life.reason
        closes = reason.closes_namespace and not self.others_stay
        grace_seconds = place.grace_seconds if reason.has_grace else 0.0
        log.info("leaving: %s", life.why)
        self.drain.begin(life.why)
        await asyncio.sleep(min(grace_seconds, _ANSWER_SECONDS))
        is_over = time.monotonic() + grace_seconds
        await self._in_time(self.queue.leave())
        if grace_seconds:
            if await self._in_time(place.stop_frontends(closes_namespace=closes)) is not False:
                await self._until_uncalled(grace_seconds)
            else:
                # A second stage: callers drop calls that they are sending to an unlisted worker, and a prefill's KV
                # would wait for its lease's end.
                self.drain.refuses = True
                await asyncio.sleep(min(grace_seconds, _SENT_SECONDS))
        await self._in_time(place.unlist())
        if life.reason.stays:
            await asyncio.sleep(is_over - time.monotonic())
        life.happened(Event.UNCALLED)
        opening = asyncio.create_task(self._open_namespace(is_over), name="opening")
        try:
            ended = await (self._paused() if reason.pauses else self._drained())
        finally:
            opening.cancel()
        await self._open_namespace()
        self.is_drained.set()
        if life.happened(ended) is Action.CUT:
            log.warning("giving the requests back to their frontends")
        await self.drain.cut()

    async def _until_uncalled(self, grace_seconds: float) -> None:
        """Wait for the grace period, or for a part of it without a request. Later requests go to other workers."""
        now = quiet_since = began = time.monotonic()
        seen = self.drain.num_entered
        while now - began < grace_seconds and now - quiet_since < grace_seconds * _UNCALLED:
            await asyncio.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if seen != (seen := self.drain.num_entered):
                quiet_since = now

    async def _in_time(self, step: Awaitable[T]) -> T | None:
        """None for a step that fails or takes too long: the worker leaves all the same."""
        try:
            async with asyncio.timeout(self.leave_seconds):
                return await step
        except TimeoutError:
            log.error("a step of leaving discovery took more than %g s", self.leave_seconds)
        except Exception as error:
            log.error("a step of leaving discovery failed: %r", error)
        return None

    async def _open_namespace(self, at: float = 0.0) -> None:
        """By the end of the grace period: a new first stage may have come, though the last request takes minutes."""
        await asyncio.sleep(at - time.monotonic())
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_SENT_SECONDS):
                await self.place.cards.open_namespace()

    async def _paused(self) -> Event:
        """Wait for a resume, possible once drained, or a stop. Cuts no request, and retries the drain."""

        async def drain() -> None:
            while not self.is_drained.is_set():
                await self._drained()
                await asyncio.sleep(_STEP_SECONDS)

        draining = asyncio.create_task(drain(), name="draining")
        try:
            await self.life.goes_on.wait()
        finally:
            draining.cancel()
            await asyncio.wait({draining})
        return Event.DRAINED if self.is_drained.is_set() else await self._drained()

    async def _drained(self) -> Event:
        ended, why = Event.DRAINED, None
        try:
            async with asyncio.timeout(self.drain_seconds):
                await self._until_quiet()
            self.is_drained.set()
        except TimeoutError:
            ended, held = Event.DEADLINE, self.engine.handoffs.count()
            running = f"{self.drain.num_running} requests still run after {self.drain_seconds:g} s"
            why = f"{running}; the KV of {held} handoffs may still be read"
        except Exception as error:
            why = f"cannot ask the engine whether it is idle: {error}"
        if why not in (None, self.waits_for):
            log.warning(why)
        self.waits_for = why
        return ended

    async def _until_quiet(self) -> None:
        """Wait until no request runs or is relayed, and no decode worker may still read KV here."""
        await self.drain.none_runs()
        stepping = asyncio.create_task(self._step(), name="steps")
        try:
            engine = self.engine
            while engine.death is None and (num_in_background() or not await engine.is_idle()):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            stepping.cancel()

    async def _step(self) -> None:
        """Give TensorRT-LLM a small request each second while it may hold KV: it reports fetched KV only in its next
        step, and takes no step without a request.
        """
        engine = self.engine
        while COUNTS_REQUESTS not in engine.capabilities:
            if engine.handoffs.has_statistics and engine.handoffs.count():
                with contextlib.suppress(DisaggError):
                    await engine.probe(decode_request(SMALLEST_REQUEST))
            await asyncio.sleep(_STEP_SECONDS)
