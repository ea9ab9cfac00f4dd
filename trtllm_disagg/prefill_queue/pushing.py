"""The prefill workers through the queue: a stage client that does not choose, but lets them choose."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Iterator
from functools import partial
from typing import Any

from nats.aio.msg import Msg

from trtllm_disagg.errors import DisaggError, NoInstanceError, PeerUnavailableError, QueueUnusableError
from trtllm_disagg.handlers.background import in_background
from trtllm_disagg.handlers.remote import QUEUE_ID
from trtllm_disagg.prefill_queue.broker import Broker
from trtllm_disagg.prefill_queue.messages import (
    NO,
    YES,
    Cancel,
    Claim,
    FromPuller,
    Item,
    UnreadableError,
    decode,
    encode,
)
from trtllm_disagg.prefill_queue.pushed import Pushed
from trtllm_disagg.types import GenerateRequest, Journey, RequestContext

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
        """Nobody can be wished for here: whoever has room takes the item."""

    async def run(
        self, raw: dict[str, Any], request: GenerateRequest, context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """What a prefill worker answers. Raises a DisaggError with `peer`."""
        request_id = context.id() if context is not None else None
        item = Item(uuid.uuid4().hex, self._id, request_id, sorted(request.avoid), raw)
        pushed = Pushed(item, self._timeout, partial(_note, request.journey, time.monotonic()))
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
        """Nobody waits any more: out of the queue with it, and who is at it is told."""
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
    """A StageInstance: the prefill worker that will take the item, whoever that is."""

    instance_id = QUEUE_ID

    def __init__(self, client: QueueClient, request: GenerateRequest) -> None:
        self._client = client
        self._request = request

    async def describe(self) -> dict[str, Any]:
        raise PeerUnavailableError("nobody knows yet which prefill worker will take this request")

    def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        return self._client.run(request, self._request, context)


def _note(journey: Journey, pushed_at: float, claim: Claim) -> None:
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
