"""How a worker leaves its deployment, for every reason: it leaves discovery, waits for its running requests, and hands
those that take too long back to their frontends. Dynamo's own shutdown would stop them after 30 s as if their clients
had disconnected.
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
from trtllm_disagg.errors import DisaggError
from trtllm_disagg.handlers.cancellation import WorkerDrain, num_in_background
from trtllm_disagg.prefill_queue import PrefillQueue
from trtllm_disagg.wire.bodies import decode_request
from trtllm_disagg.worker.life import Action, Event, Life

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Engines have no event for being idle, so they are polled.
_POLL_SECONDS = 0.05
#: For the removal from discovery. Behind a discovery that hangs, requests still end and the engine is closed.
_LEAVE_SECONDS = 5.0
#: Between two steps of an engine that reports fetched KV only during a step.
_STEP_SECONDS = 1.0
#: For the answer to a command: Dynamo drops the answers of a worker that has left discovery.
_ANSWER_SECONDS = 0.1
#: The part of the grace period without a request after which frontends count as knowing that this worker leaves.
_UNCALLED = 0.25
#: Time for calls in flight to arrive, and to be refused.
_SENT_SECONDS = 0.25


@dataclass(eq=False)
class Leaving:
    life: Life
    place: Registration
    drain: WorkerDrain
    engine: Engine
    queue: PrefillQueue
    drain_seconds: float
    leave_seconds: float = _LEAVE_SECONDS
    #: No request runs any more, or the drain is over.
    is_quiet: asyncio.Event = field(default_factory=asyncio.Event)

    async def finish(self, seconds: float) -> int:
        """Leave on a command. Returns the number of requests that still run after `seconds`, or 0 once none does."""
        if self.life.command(Event.FINISH) is Action.LEAVE:
            self.drain_seconds = seconds
        await self.is_quiet.wait()
        return self.drain.num_running

    async def run(self) -> None:
        """From unlisted to over."""
        life, place, reason = self.life, self.place, self.life.reason
        grace_seconds = place.grace_seconds if reason.has_grace else 0.0
        log.info("leaving: %s", life.why)
        self.drain.begin(life.why)
        await asyncio.sleep(min(grace_seconds, _ANSWER_SECONDS))
        is_over = time.monotonic() + grace_seconds
        await self._in_time(self.queue.leave())
        if grace_seconds:
            if await self._in_time(place.hide(closes_namespace=reason.closes_namespace)) is not False:
                await self._until_uncalled(grace_seconds)
            else:
                # A second stage: a caller drops a call that it is sending to a worker that leaves discovery, and the KV
                # of a prefill would wait for the end of its lease.
                self.drain.refuses = True
                await asyncio.sleep(min(grace_seconds, _SENT_SECONDS))
        await self._in_time(place.unlist())
        if life.reason.stays:
            await asyncio.sleep(is_over - time.monotonic())
        life.happened(Event.UNCALLED)
        opening = asyncio.create_task(self._open_namespace(is_over), name="opening")
        try:
            ended = await self._drained()
        finally:
            opening.cancel()
        await self._open_namespace()
        self.is_quiet.set()
        life.happened(ended)
        await self.drain.cut()

    async def _until_uncalled(self, grace_seconds: float) -> None:
        """Wait for the grace period, or until no request has come for a part of it. A request that comes later finds no
        worker, and is sent to another one.
        """
        now = quiet_since = began = time.monotonic()
        seen = self.drain.num_entered
        while now - began < grace_seconds and now - quiet_since < grace_seconds * _UNCALLED:
            await asyncio.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if seen != (seen := self.drain.num_entered):
                quiet_since = now

    async def _in_time(self, step: Awaitable[T]) -> T | None:
        """None for a step that fails, or takes too long: the worker leaves all the same."""
        try:
            async with asyncio.timeout(self.leave_seconds):
                return await step
        except TimeoutError:
            log.error("a step of leaving discovery took more than %g s", self.leave_seconds)
        except Exception as error:
            log.error("a step of leaving discovery failed: %r", error)
        return None

    async def _open_namespace(self, at: float = 0.0) -> None:
        """By the end of the grace period: another first stage may have come, while the last request takes minutes."""
        await asyncio.sleep(at - time.monotonic())
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_SENT_SECONDS):
                await self.place.cards.open_namespace()

    async def _drained(self) -> Event:
        try:
            async with asyncio.timeout(self.drain_seconds):
                await self._until_quiet()
        except TimeoutError:
            log.warning(
                "%d requests still run after %g s: they are handed back to their frontends; the KV of %d handoffs may "
                "still be read",
                self.drain.num_running,
                self.drain_seconds,
                self.engine.handoffs.count(),
            )
            return Event.DEADLINE
        except Exception as error:
            log.warning("the engine cannot be asked whether it is idle: %s", error)
        return Event.DRAINED

    async def _until_quiet(self) -> None:
        """Wait until no request runs or is relayed, and no KV is held that a decode worker may still read."""
        await self.queue.drained()
        await self.drain.none_runs()
        stepping = asyncio.create_task(self._step(), name="steps")
        try:
            engine = self.engine
            while engine.death is None and (num_in_background() or not await engine.is_idle()):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            stepping.cancel()

    async def _step(self) -> None:
        """Give TensorRT-LLM a small request each second while it may hold KV: only in its next step it reports that
        decode has fetched KV, and it takes no step without a request.
        """
        engine = self.engine
        while COUNTS_REQUESTS not in engine.capabilities:
            if engine.handoffs.has_statistics and engine.handoffs.count():
                with contextlib.suppress(DisaggError):
                    await engine.probe(decode_request(SMALLEST_REQUEST))
            await asyncio.sleep(_STEP_SECONDS)
