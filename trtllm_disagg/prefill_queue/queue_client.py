"""The pushing side of the prefill queue: a StageClient that leaves the choice of the worker to the queue."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AbstractAsyncContextManager, nullcontext
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
from trtllm_disagg.handlers.cancellation import in_background, when_stopped
from trtllm_disagg.handlers.circuit_breaker import QUEUE_ID
from trtllm_disagg.handlers.select import Instances, StageInstance
from trtllm_disagg.prefill_queue.broker import Broker, QueueLimits, Reply
from trtllm_disagg.prefill_queue.messages import (
    MAX_AVOIDED,
    MAX_ID_CHARS,
    NO,
    YES,
    Answer,
    Beat,
    Claim,
    FromPuller,
    Item,
    UnreadableError,
    decode,
    encode,
)
from trtllm_disagg.types import GenerateRequest, RequestContext

log = logging.getLogger(__name__)


def _always() -> bool:
    return True


class Pushed:
    """An item as its pusher sees it: which worker runs it, and its outcome.

    `outcome` is the answer, which `take` has yet to accept; None when the client has left; or an error.
    """

    def __init__(
        self,
        item: Item,
        timeout: float,
        on_claim: Callable[[Claim], None],
        limits: QueueLimits,
        has_workers: Callable[[], bool] = _always,
    ) -> None:
        """`timeout`: the item fails after so many seconds without a claim. Once it is claimed, it fails after as many
        without a Beat, but not before `limits.silence`: a shorter time would fail an item that a worker runs. Where
        `has_workers` is false it fails at once while it is unclaimed, and after `limits.silence` once it is claimed: a
        worker that leaves is not in discovery either, and finishes what it has claimed.
        """
        self.item = item
        self.outcome: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        #: The item's place in the stream, once it is pushed.
        self.sequence: int | None = None
        #: The latest claim that was accepted.
        self.claim: Claim | None = None
        #: A worker has answered or failed: it runs the item no more, and there is nothing to cancel.
        self.is_settled = False
        self._num_claims = 0
        self._limits = limits
        self._timeout = timeout
        self._has_workers = has_workers
        self._on_claim = on_claim
        #: Replies to the answer. Until the reply is yes, the prefill worker keeps the duty to release the KV.
        self._reply: Callable[[bool], None] = _no_reply
        self._pushed_at = self._heard_at = time.monotonic()
        self._timer = self._look_later()

    @property
    def age(self) -> float:
        """Seconds since the item was pushed."""
        return time.monotonic() - self._pushed_at

    @property
    def is_waiting(self) -> bool:
        """No worker has begun the item."""
        return self.claim is None and not self.outcome.done()

    def receive(self, message: FromPuller, reply: Callable[[bool], None]) -> None:
        """Handle a prefill worker's message. Only the attempt with the latest accepted claim counts."""
        if self.outcome.done():
            reply(False)
        elif isinstance(message, Claim):
            reply(self._accept(message))
        elif self.claim is None or message.attempt != self.claim.attempt:
            reply(False)
        elif isinstance(message, Beat):
            self._heard_at = time.monotonic()
        elif isinstance(message, Answer):
            self.is_settled, self._reply = True, reply
            self.outcome.set_result(message.chunk)
        else:
            self.is_settled = True
            worker, error = self.claim.worker, message.error()
            # A worker that the item avoids has refused it: that says nothing of the worker, but that no other is there.
            is_queues = worker in self.item.avoid or isinstance(error, QueueUnusableError)
            self.fail(error, QUEUE_ID if is_queues else worker)

    def take(self) -> dict[str, Any]:
        """Take the answer, and with it the duty to release its KV."""
        chunk = self.outcome.result()
        assert chunk is not None
        self._reply_to_answer(True)
        return chunk

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
        """The outcome is not needed any more; refuse an answer that was not taken."""
        self._timer.cancel()
        if not self.outcome.cancel() and not self.outcome.cancelled():
            self.outcome.exception()  # else asyncio would log that it was never retrieved
        self._reply_to_answer(False)

    def _reply_to_answer(self, is_taken: bool) -> None:
        """Only the first call replies."""
        reply, self._reply = self._reply, _no_reply
        reply(is_taken)

    def _accept(self, claim: Claim) -> bool:
        if self.claim is not None and claim.attempt <= self.claim.attempt:
            return False
        if self._num_claims == self._limits.claims:
            self.fail(PeerUnavailableError(f"{self._limits.claims} prefill workers have lost this request"))
            return False
        self.claim = claim
        self._num_claims += 1
        self._heard_at = time.monotonic()
        self._on_claim(claim)
        return True

    @property
    def _silence(self) -> tuple[float, float]:
        """(seconds without a worker's word, after how many of them the item fails)."""
        most = self._timeout if self.claim is None else max(self._timeout, self._limits.silence)
        return time.monotonic() - self._heard_at, most

    def _look_later(self) -> asyncio.TimerHandle:
        silent, most = self._silence
        seconds = min(self._limits.look, max(0.0, most - silent))
        return asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        (silent, most), claim = self._silence, self.claim
        if silent >= most:
            what, peer = "no prefill worker has taken the request from the queue", QUEUE_ID
            if claim is not None:
                peer = claim.worker
                what = f"the prefill worker {peer:x} has fallen silent, and no other has taken over"
            self.fail(StageTimeoutError(f"{what} within {most:g} s (--queue-timeout)"), peer)
        elif (claim is None or silent >= self._limits.silence) and not self._has_workers():
            self.fail(_no_worker())
        else:
            self._timer = self._look_later()


def _no_worker() -> NoInstanceError:
    return NoInstanceError("no prefill worker is in discovery to pull from the prefill queue")


def _no_reply(is_taken: bool) -> None:
    """In place of a reply when no answer has come, or when it has its reply already."""


def _fit_for_an_item(request_id: str | None) -> str | None:
    """A worker would not read an item with another id, and only names it in its log."""
    is_fit = request_id is not None and len(request_id) <= MAX_ID_CHARS and request_id.isprintable()
    return request_id if is_fit else None


class QueueClient:
    """A StageClient. Each call of what it picks pushes one item. Prefill workers can answer inside `listening`."""

    def __init__(self, broker: Broker, timeout: float) -> None:
        """`timeout`: seconds that an item may wait for a worker."""
        self._broker = broker
        self._timeout = timeout
        self._id = uuid.uuid4().hex
        self._has_workers: Callable[[], bool] = _always
        self._pushed: dict[str, Pushed] = {}
        broker.on_lost(self._lost)

    @property
    def subject(self) -> str:
        """The subject of prefill workers' messages about this client's items."""
        return self._broker.names.pusher(self._id)

    def listening(self) -> AbstractAsyncContextManager[None]:
        return self._broker.listening(self.subject, self._receive)

    def require(self, workers: Instances) -> None:
        """From now on a request gets NoInstanceError, and does not wait, while none of `workers` is in discovery."""
        self._has_workers = lambda: bool(workers.instance_ids())

    def waiting_ages(self) -> list[float]:
        """For how many seconds each item that no prefill worker has begun has waited."""
        return [pushed.age for pushed in self._pushed.values() if pushed.is_waiting]

    async def pick(self, request: GenerateRequest) -> QueuedPrefill:
        if not self._has_workers():
            raise _no_worker()
        if QUEUE_ID in request.avoid:
            raise NoInstanceError("the prefill queue has failed this request already")
        if not self._broker.is_usable:
            raise QueueUnusableError("the prefill queue cannot be reached: NATS is gone (--nats-server)")
        if not self._broker.takes_items:
            raise QueueUnusableError("the prefill queue takes nothing now: NATS does not reply to pushes")
        return QueuedPrefill(self, request)

    def instance_ids(self) -> Collection[int]:
        return (QUEUE_ID,)

    def instance(self, instance_id: int) -> StageInstance:
        raise AssertionError("the queue chooses the worker")

    def check(self, request: GenerateRequest) -> None:
        """Pins do not apply to the queue: the first prefill worker with room takes the item."""

    async def run(
        self,
        raw: dict[str, Any],
        request: GenerateRequest,
        context: RequestContext | None,
        on_claim: Callable[[Claim], None],
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Push an item and yield a prefill worker's answer. Raises a DisaggError with `peer`."""
        request_id = _fit_for_an_item(context.id()) if context is not None else None
        # The circuit breaker may skip more than fit, in a fleet of which much is down.
        avoid, skipped = (sorted(ids)[:MAX_AVOIDED] for ids in (request.avoid, request.skipped))
        item = Item(uuid.uuid4().hex, self._id, request_id, avoid, raw, skipped)
        pushed = Pushed(item, self._timeout, on_claim, self._broker.limits, self._has_workers)
        self._pushed[item.id] = pushed
        try:
            with nullcontext() if context is None else when_stopped(context, pushed.give_up):
                pushed.sequence = await self._broker.push(encode(item))
                answer = await pushed.outcome
            if answer is not None:
                # No await from here to the caller: a cancel cannot come in between.
                yield pushed.take()
        except DisaggError as error:
            if error.peer is None:
                error.peer = QUEUE_ID
            raise
        finally:
            del self._pushed[item.id]
            pushed.close()
            if not pushed.is_settled:
                in_background(self._cancel(pushed), "cancel of a queued prefill")

    async def notify(self, instance_id: int, notice: dict[str, Any]) -> None:
        reply = await self._broker.ask(self._broker.names.puller(instance_id), encode(notice))
        if reply is not Reply.YES:
            raise PeerUnavailableError(
                f"prefill worker {instance_id:x} has not confirmed a notice ({reply.value})"
            )

    async def _cancel(self, pushed: Pushed) -> None:
        """No request waits for the item any more: delete it from the queue, or tell the worker that runs it to stop."""
        if pushed.claim is not None:
            await self._broker.send(self._broker.names.cancel(pushed.item.id), b"")
        elif pushed.sequence is not None:
            await self._broker.withdraw(pushed.sequence)

    async def _receive(self, message: Msg) -> None:
        try:
            decoded: FromPuller = decode(message.data, FromPuller)
        except UnreadableError as error:
            log.warning("an unreadable message about a queued prefill: %s", error)
            return
        reply = partial(self._reply, message.reply)
        pushed = self._pushed.get(decoded.item)
        if pushed is None:
            reply(False)
        else:
            pushed.receive(decoded, reply)

    def _reply(self, subject: str, yes: bool) -> None:
        if subject:
            in_background(self._broker.send(subject, YES if yes else NO), "reply to a queued prefill")

    def _lost(self, why: str) -> None:
        for pushed in self._pushed.values():
            pushed.fail(QueueUnusableError(f"the prefill queue cannot be reached: {why}"))


class QueuedPrefill:
    """A StageInstance: stands for the prefill worker that will take the item, which is not known yet."""

    def __init__(self, client: QueueClient, request: GenerateRequest) -> None:
        self._client = client
        self._request = request
        #: The worker that has taken the item last.
        self.instance_id = QUEUE_ID

    async def describe(self) -> dict[str, Any]:
        raise PeerUnavailableError("it is not known yet which prefill worker will take this request")

    async def notify(self, notice: dict[str, Any]) -> None:
        """To the worker that has taken the item last."""
        await self._client.notify(self.instance_id, notice)

    def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        on_claim = partial(self._claimed, time.monotonic())
        return self._client.run(request, self._request, context, on_claim)

    def _claimed(self, pushed_at: float, claim: Claim) -> None:
        self.instance_id = claim.worker
        note_claim(self._request, pushed_at, claim)


def note_claim(request: GenerateRequest, pushed_at: float, claim: Claim) -> None:
    now, instance = time.monotonic(), f"{claim.worker:x}"
    request.trace.facts["prefill_instance"] = instance
    request.trace.facts["prefill_queue_ms"] = round((now - pushed_at) * 1000, 1)
    request.span.measured("queue_wait", pushed_at, now, {"instance": instance})
