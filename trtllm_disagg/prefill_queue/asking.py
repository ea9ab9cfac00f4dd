"""The asker's part of the prefill queue: pushes a ticket per request, and answers offers of prefill workers.

A request accepts one offer. Only the asker knows whether the request still waits, so it refuses later offers, and
offers of workers that must not get the request; the refused worker has its room again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection

from nats.aio.msg import Msg

from trtllm_disagg.errors import DisaggError, QueueUnusableError, RequestCancelledError, StageTimeoutError
from trtllm_disagg.handlers.cancellation import when_stopped
from trtllm_disagg.handlers.drain import in_background
from trtllm_disagg.prefill_queue.broker import Broker
from trtllm_disagg.prefill_queue.tickets import Answer, Offer, Ticket, UnreadableError, decode, encode
from trtllm_disagg.types import GenerateRequest, RequestContext

log = logging.getLogger(__name__)

#: Seconds between two queries of the queue's length.
_ASK_SECONDS = 0.25

#: As for `handlers.queued.RequestQueue.worker_with_room`.
Takers = Callable[[], Collection[int]]


class _Waiting:
    """A request in the queue. `worker`: the prefill worker that it accepted, or the request's error."""

    def __init__(self, takers: Takers) -> None:
        self.worker: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        #: The ticket's place in the stream, once it is pushed.
        self.place: int | None = None
        self._takers = takers
        self._began = time.monotonic()

    @property
    def age(self) -> float:
        return time.monotonic() - self._began

    def answer(self, worker: int) -> Answer:
        """Accept the first offer of a worker that may get the request."""
        if not self.worker.done():
            try:
                if worker not in self._takers():
                    return Answer.REFUSED
            except DisaggError as error:
                self.fail(error)
            else:
                self.worker.set_result(worker)
                return Answer.ACCEPTED
        return Answer.OVER

    def fail(self, error: DisaggError) -> None:
        if not self.worker.done():
            self.worker.set_exception(error)

    async def wait(self, timeout: float, look: float) -> int:
        """Wait up to `timeout` seconds for an offer. Every `look` seconds, check that a worker can make one."""
        while not self.worker.done():
            if self.age >= timeout:
                raise StageTimeoutError(
                    f"no prefill worker took the request from the queue within {timeout:g} s (--queue-timeout)"
                )
            self._takers()
            await asyncio.wait({self.worker}, timeout=min(look, max(0.0, timeout - self.age)))
        return self.worker.result()

    def close(self) -> bool:
        """Refuse offers from now on. Returns whether one was accepted."""
        return not self.worker.cancel() and self.worker.exception() is None


class Asking:
    """This worker's requests in the queue, and NATS' numbers for all workers' requests. Works inside `running`."""

    def __init__(self, broker: Broker, timeout: float) -> None:
        """`timeout`: seconds that a request may wait for a prefill worker."""
        self._broker = broker
        self._timeout = timeout
        self._id = uuid.uuid4().hex
        self._waiting: dict[str, _Waiting] = {}
        #: All workers' tickets in NATS' last report: their number, and the oldest's time in seconds since the epoch.
        self._num_waiting, self._oldest_at = 0, 0.0
        broker.on_lost = self._lost

    async def worker_with_room(
        self, request: GenerateRequest, context: RequestContext, takers: Takers
    ) -> int:
        """See `handlers.queued.RequestQueue`."""
        takers()
        self._broker.require_usable()
        ticket, waiting = Ticket(uuid.uuid4().hex, self._id, request.num_prompt), _Waiting(takers)
        self._waiting[ticket.id] = waiting
        has_left = RequestCancelledError("the client left while its request was in the prefill queue")
        try:
            with when_stopped(context, lambda: waiting.fail(has_left)):
                waiting.place = await self._broker.push(encode(ticket))
                return await waiting.wait(self._timeout, self._broker.limits.look)
        finally:
            del self._waiting[ticket.id]
            if not waiting.close() and waiting.place is not None:
                in_background(self._broker.withdraw(waiting.place), "withdrawal of a ticket")

    def depth(self) -> int:
        """The number of waiting requests. An unreachable queue counts as empty."""
        return max(self._num_waiting, len(self._ages()))

    def age(self) -> float:
        """Seconds that the oldest request has waited; 0 if none waits."""
        known = time.time() - self._oldest_at if self._num_waiting else 0.0
        return max(0.0, known, *self._ages())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside, prefill workers can make offers. Raises QueueUnusableError."""
        async with self._broker.listening(self._broker.names.asker(self._id), self._receive):
            watching = asyncio.create_task(self._watch(), name="prefill-queue-depth")
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.wait({watching})

    def _ages(self) -> list[float]:
        """This worker's own waits: NATS' numbers come later."""
        return [each.age for each in self._waiting.values() if not each.worker.done()]

    async def _receive(self, message: Msg) -> None:
        try:
            offer: Offer = decode(message.data, Offer)
        except UnreadableError as error:
            log.warning("an unreadable offer in the prefill queue: %s", error)
            return
        waiting = self._waiting.get(offer.ticket)
        answer = Answer.OVER if waiting is None else waiting.answer(offer.worker)
        await self._broker.send(message.reply, answer.value)

    def _lost(self) -> None:
        self._num_waiting = 0
        for waiting in self._waiting.values():
            waiting.fail(
                QueueUnusableError("the prefill queue cannot be reached: NATS is gone (--nats-server)")
            )

    async def _watch(self) -> None:
        while True:
            await self._broker.wait_until_usable()
            try:
                await self._look()
            except Exception as error:
                # A stale depth would keep every request away from the queue, or none.
                self._num_waiting = 0
                if not isinstance(error, QueueUnusableError):
                    log.exception("querying the prefill queue failed; it counts as empty")
            await asyncio.sleep(_ASK_SECONDS)

    async def _look(self) -> None:
        pushed = [each for each in self._waiting.values() if each.place is not None]
        state = await self._broker.state()
        for each in pushed:
            # As after a purge, or if the stream was deleted and made again. An accepted ticket is gone too.
            if each.place is not None and not state.first_seq <= each.place <= state.last_seq:
                each.fail(
                    QueueUnusableError("the prefill queue has lost the request: NATS has no ticket of it")
                )
        oldest_at = await self._broker.pushed_at(state.first_seq) if state.messages else None
        self._num_waiting, self._oldest_at = (0, 0.0) if oldest_at is None else (state.messages, oldest_at)
