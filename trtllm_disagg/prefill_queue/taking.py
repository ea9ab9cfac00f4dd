"""The prefill worker's part of the prefill queue: while it has room, it takes tickets and offers itself to their
askers. An asker that accepts calls it as it would without the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

from nats.aio.msg import Msg

from trtllm_disagg.prefill_queue.broker import NATS_ERRORS, Broker, preserve_cancellation
from trtllm_disagg.prefill_queue.tickets import Answer, Offer, Ticket, UnreadableError, decode, encode

log = logging.getLogger(__name__)

#: The longest pull. A stopping worker may still get a ticket for this time, and returns it at once.
_PULL_SECONDS = 0.5
#: If the asker refuses this worker, JetStream delivers the ticket again after this time.
_REFUSED_SECONDS = 0.05


class Room:
    """Limits a prefill worker to what one step of its engine computes.

    A worker has room while fewer than `max_prefills` prefills and fewer than `max_tokens` prompt tokens run or are
    expected. So short prompts share a step, a long one runs alone, and the engine always has work. Other requests wait
    in the queue for any worker.
    """

    def __init__(self, max_prefills: int, max_tokens: int) -> None:
        self._max_prefills = max_prefills
        self._max_tokens = max_tokens
        #: Tickets with a call to come, the oldest first.
        self._expected: dict[str, Ticket] = {}
        self._num_running = self._num_tokens = 0
        self._changed = asyncio.Event()

    @property
    def is_there(self) -> bool:
        num_tokens = self._num_tokens + sum(each.tokens for each in self._expected.values())
        return self._num_running + len(self._expected) < self._max_prefills and num_tokens < self._max_tokens

    def expect(self, ticket: Ticket) -> None:
        self._expected[ticket.id] = ticket

    def forget(self, ticket: Ticket) -> None:
        """Idempotent."""
        self._expected.pop(ticket.id, None)
        self._changed.set()

    async def called(self, ticket: Ticket, seconds: float) -> None:
        """Wait for the call, at most `seconds`: the asker may have died."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.until(lambda: ticket.id not in self._expected)

    @contextlib.contextmanager
    def prefilling(self, tokens: int) -> Iterator[None]:
        """Count a prefill of `tokens` prompt tokens inside the block. If a call of this length is expected, it counts
        as arrived: the sums are right even if it is another call.
        """
        came = next((each for each in self._expected.values() if each.tokens == tokens), None)
        if came is not None:
            self.forget(came)
        self._num_running, self._num_tokens = self._num_running + 1, self._num_tokens + tokens
        try:
            yield
        finally:
            self._num_running, self._num_tokens = self._num_running - 1, self._num_tokens - tokens
            self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


class Taking:
    """Takes tickets from `start` until `leave`."""

    def __init__(self, broker: Broker, instance_id: int, room: Room) -> None:
        self._broker = broker
        self._instance_id = instance_id
        self._room = room
        self._offers: set[asyncio.Task[None]] = set()
        self._is_leaving = False
        self._is_pulling = False
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._take(), name="prefill-queue")

    async def leave(self) -> None:
        """Take no further ticket, and wait for the expected calls."""
        self._stop()
        if self._offers:
            await asyncio.wait(self._offers)

    async def close(self) -> None:
        self._stop()
        for offer in self._offers:
            offer.cancel()
        tasks = [*self._offers, *([] if self._loop is None else [self._loop])]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self) -> None:
        self._is_leaving = True
        # During a pull, JetStream would count a ticket in transit as delivered.
        if self._loop is not None and not self._is_pulling:
            self._loop.cancel()

    async def _take(self) -> None:
        while not self._is_leaving:
            await self._room.until(lambda: self._room.is_there)
            await self._broker.wait_until_usable()
            self._is_pulling = True
            try:
                message = await self._broker.pull(_PULL_SECONDS)
            except Exception as error:  # requests wait for this worker, which is in discovery
                is_foreseen = isinstance(error, NATS_ERRORS)
                log.warning("pulling tickets failed; trying again: %r", error, exc_info=not is_foreseen)
                await asyncio.sleep(_PULL_SECONDS)
                continue
            finally:
                self._is_pulling = False
            if message is None:
                continue
            if self._is_leaving or not self._room.is_there:  # a direct call may have come
                await _settle(message.nak())
            else:
                self._begin(message)

    def _begin(self, message: Msg) -> None:
        try:
            ticket: Ticket = decode(message.data, Ticket)
        except UnreadableError as error:
            log.warning("dropping an unreadable ticket in the prefill queue: %s", error)
            task = asyncio.create_task(_settle(message.term()))
        else:
            self._room.expect(ticket)
            task = asyncio.create_task(self._offer(message, ticket))
            task.add_done_callback(lambda _: self._room.forget(ticket))
        self._offers.add(task)
        task.add_done_callback(self._offers.discard)

    async def _offer(self, message: Msg, ticket: Ticket) -> None:
        """Offer this worker to the asker, and keep room until the call comes."""
        offer = encode(Offer(ticket.id, self._instance_id))
        answer = await self._broker.ask(self._broker.names.asker(ticket.asker), offer)
        # A silent asker has the offer, and may still call.
        await _settle(message.nak(_REFUSED_SECONDS) if answer is Answer.REFUSED else message.ack())
        if answer is Answer.ACCEPTED:
            await self._room.called(ticket, self._broker.limits.call)


async def _settle(message: Awaitable[None]) -> None:
    """Send JetStream a message about a ticket. If it is lost, the ticket comes again, and the asker decides."""
    with contextlib.suppress(*NATS_ERRORS):
        await preserve_cancellation(message)
