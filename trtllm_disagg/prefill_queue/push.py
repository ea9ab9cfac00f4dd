"""The prefill workers through the queue: a stage client that does not choose, but lets them choose."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from functools import partial
from typing import Any

from nats.aio.msg import Msg

from trtllm_disagg.errors import (
    DisaggError,
    NoInstanceError,
    PeerUnavailableError,
    QueueUnusableError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.cancellation import in_background
from trtllm_disagg.handlers.remote import QUEUE_ID
from trtllm_disagg.prefill_queue.broker import Broker
from trtllm_disagg.prefill_queue.messages import (
    NO,
    YES,
    Answer,
    Beat,
    Cancel,
    Claim,
    FromPuller,
    Item,
    UnreadableError,
    decode,
    encode,
    failure_of,
)
from trtllm_disagg.types import GenerateRequest, RequestContext, RequestTrace

#: An item that so many workers have lost is not given to another one.
MAX_CLAIMS = 3


class Arrived:
    """An answer that is not taken yet. Its sender keeps the duty to release the KV until it is."""

    def __init__(self, chunk: dict[str, Any], reply: Callable[[bool], None]) -> None:
        self._chunk = chunk
        self._reply = reply
        self._is_settled = False

    def take(self) -> dict[str, Any]:
        self._settle(True)
        return self._chunk

    def refuse(self) -> None:
        """Idempotent; nothing happens after `take`."""
        if not self._is_settled:
            self._settle(False)

    def _settle(self, taken: bool) -> None:
        self._is_settled = True
        self._reply(taken)


class Pushed:
    """An item as its pusher sees it: which worker is at it, and what became of it.

    `outcome` is what arrived, None when the client has left, or an error.
    """

    def __init__(self, item: Item, timeout: float, on_claim: Callable[[Claim], None]) -> None:
        """`timeout`: seconds for which no worker may be at it."""
        self.item = item
        self.outcome: asyncio.Future[Arrived | None] = asyncio.get_running_loop().create_future()
        #: Its place in the stream, once it is there.
        self.sequence: int | None = None
        #: The latest worker that was let in.
        self.claim: Claim | None = None
        self._num_claims = 0
        self._is_settled = False
        self._timeout = timeout
        self._on_claim = on_claim
        self._timer = self._wait()
        self._began = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since it was pushed."""
        return time.monotonic() - self._began

    @property
    def is_waiting(self) -> bool:
        """No worker has begun."""
        return self.claim is None and not self.outcome.done()

    @property
    def is_settled(self) -> bool:
        """A worker has answered, and needs to hear no more."""
        return self._is_settled

    def hear(self, said: FromPuller, reply: Callable[[bool], None]) -> None:
        """Only one attempt is listened to: the latest that was let in."""
        if self.outcome.done():
            reply(False)
        elif isinstance(said, Claim):
            reply(self._let_in(said))
        elif self.claim is None or said.attempt != self.claim.attempt:
            reply(False)
        elif isinstance(said, Beat):
            self._wait_anew()
        elif isinstance(said, Answer):
            self._is_settled = True
            self.outcome.set_result(Arrived(said.chunk, reply))
        else:
            self._is_settled = True
            self.fail(failure_of(said), self.claim.worker)

    def fail(self, error: DisaggError, peer: int = QUEUE_ID) -> None:
        """`peer`: the instance to blame."""
        error.peer = peer
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def give_up(self) -> None:
        """The client has left."""
        if not self.outcome.done():
            self.outcome.set_result(None)

    def close(self) -> None:
        """The outcome is not asked for any more."""
        self._timer.cancel()
        if not self.outcome.done():
            self.outcome.cancel()
        elif not self.outcome.cancelled() and self.outcome.exception() is None:
            arrived = self.outcome.result()
            if arrived is not None:
                arrived.refuse()

    def _let_in(self, claim: Claim) -> bool:
        if self.claim is not None and claim.attempt <= self.claim.attempt:
            return False
        if self._num_claims == MAX_CLAIMS:
            self.fail(PeerUnavailableError(f"{MAX_CLAIMS} prefill workers have lost this request"))
            return False
        self.claim = claim
        self._num_claims += 1
        self._on_claim(claim)
        self._wait_anew()
        return True

    def _wait_anew(self) -> None:
        self._timer.cancel()
        self._timer = self._wait()

    def _wait(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._timeout, self._time_out)

    def _time_out(self) -> None:
        what, peer = "no prefill worker has taken the request from the queue", QUEUE_ID
        if self.claim is not None:
            peer = self.claim.worker
            what = f"the prefill worker {peer:x} has fallen silent, and no other has taken over"
        self.fail(StageTimeoutError(f"{what} within {self._timeout:g} s (--queue-timeout)"), peer)


log = logging.getLogger(__name__)


class QueueClient:
    """A StageClient. Each pick is an item of its own."""

    def __init__(self, broker: Broker, timeout: float) -> None:
        """`timeout`: seconds that an item may wait for a worker."""
        self._broker = broker
        self._timeout = timeout
        self._id = uuid.uuid4().hex
        self._pushed: dict[str, Pushed] = {}
        broker.on_lost(self._lost)

    async def start(self) -> None:
        await self._broker.listen(self._broker.names.pusher(self._id), self._hear)

    @property
    def num_waiting(self) -> int:
        """Items of this worker that no prefill worker has begun."""
        return sum(pushed.is_waiting for pushed in self._pushed.values())

    def waits(self) -> list[float]:
        """For how many seconds each of them has waited."""
        return [pushed.age for pushed in self._pushed.values() if pushed.is_waiting]

    async def pick(self, request: GenerateRequest) -> QueuedPrefill:
        if QUEUE_ID in request.avoid:
            raise NoInstanceError("the prefill queue has failed this request already")
        if not self._broker.is_usable:
            raise QueueUnusableError("the prefill queue cannot be reached: NATS is gone (--nats-server)")
        return QueuedPrefill(self, request)

    def instance_ids(self) -> Collection[int]:
        return (QUEUE_ID,)

    def check(self, request: GenerateRequest) -> None:
        """A request cannot ask for an instance here: the first prefill worker with room takes the item."""

    async def run(
        self, raw: dict[str, Any], request: GenerateRequest, context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """What a prefill worker answers. Raises a DisaggError with `peer`."""
        request_id = context.id() if context is not None else None
        item = Item(uuid.uuid4().hex, self._id, request_id, sorted(request.avoid), raw)
        pushed = Pushed(item, self._timeout, partial(_note, request.trace, time.monotonic()))
        self._pushed[item.id] = pushed
        try:
            with _given_up_when_stopped(pushed, context):
                pushed.sequence = await self._broker.push(encode(item))
                arrived = await pushed.outcome
            if arrived is not None:
                # From here to the caller nothing can come between.
                yield arrived.take()
        except DisaggError as error:
            if error.peer is None:
                error.peer = QUEUE_ID
            raise
        finally:
            del self._pushed[item.id]
            is_settled = pushed.is_settled
            pushed.close()
            if not is_settled:
                in_background(self._call_off(pushed))

    async def _call_off(self, pushed: Pushed) -> None:
        """No request waits any more: the item leaves the queue, and a worker that is at it is told."""
        if pushed.claim is not None:
            puller = self._broker.names.puller(pushed.claim.puller)
            await self._broker.tell(puller, encode(Cancel(pushed.item.id)))
        elif pushed.sequence is not None:
            await self._broker.withdraw(pushed.sequence)

    async def _hear(self, message: Msg) -> None:
        try:
            said: FromPuller = decode(message.data, FromPuller)
        except UnreadableError as error:
            log.warning("an unreadable message about a queued prefill: %s", error)
            return
        reply = partial(self._reply, message.reply)
        pushed = self._pushed.get(said.item)
        if pushed is None:
            reply(False)
        else:
            pushed.hear(said, reply)

    def _reply(self, subject: str, yes: bool) -> None:
        if subject:
            in_background(self._broker.tell(subject, YES if yes else NO))

    def _lost(self, why: str) -> None:
        for pushed in self._pushed.values():
            pushed.fail(QueueUnusableError(f"the prefill queue cannot be reached: {why}"))


class QueuedPrefill:
    """A StageInstance: the prefill worker that will take the item, not known yet."""

    instance_id = QUEUE_ID

    def __init__(self, client: QueueClient, request: GenerateRequest) -> None:
        self._client = client
        self._request = request

    async def describe(self) -> dict[str, Any]:
        raise PeerUnavailableError("it is not known yet which prefill worker will take this request")

    def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        return self._client.run(request, self._request, context)


def _note(journey: RequestTrace, pushed_at: float, claim: Claim) -> None:
    journey.facts["prefill_instance"] = f"{claim.worker:x}"
    journey.facts["prefill_queue_ms"] = round((time.monotonic() - pushed_at) * 1000, 1)


@contextlib.contextmanager
def _given_up_when_stopped(pushed: Pushed, context: RequestContext | None) -> Iterator[None]:
    if context is None:
        yield
        return

    async def watch() -> None:
        await context.async_killed_or_stopped()
        pushed.give_up()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
