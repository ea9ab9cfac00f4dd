"""A worker's use of the prefill queue: connecting, pulling prefills, watching the depth, leaving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from nats.aio.msg import Msg

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import QueueMetrics, expose, registry_of
from trtllm_disagg.errors import DisaggError, InvalidRequestError, PeerUnavailableError, QueueUnusableError
from trtllm_disagg.prefill_queue.broker import NATS_ERRORS, Broker, QueueLimits, Reply, preserve_cancellation
from trtllm_disagg.prefill_queue.messages import (
    MAX_ERROR_CHARS,
    TOO_LARGE,
    YES,
    Answer,
    Beat,
    Claim,
    Failed,
    FromPuller,
    Item,
    Names,
    UnreadableError,
    decode,
    encode,
)
from trtllm_disagg.prefill_queue.queue_client import QueueClient
from trtllm_disagg.types import Generate, GenerateRequest
from trtllm_disagg.wire.bodies import decode_request, encode_chunk

log = logging.getLogger(__name__)

#: How often the depth of the queue is asked for.
_ASK_SECONDS = 0.25
#: How often for the oldest item while no worker takes any: NATS sends the whole item.
_OLDEST_SECONDS = 1.0
#: One pull takes at most this long. A worker that is told to stop may get an item so long; it gives that back at once.
_PULL_SECONDS = 0.5
#: JetStream offers an item that this worker must not run again after this time.
_OFFER_AGAIN_SECONDS = 0.05


class Room:
    """Limits a prefill worker to what one step of its engine computes.

    A worker pulls while it runs fewer than `max_tokens` prompt tokens and `max_items` items. So short prompts fill a
    step together, a long one is alone, and the engine always has work for its next step. All other items wait in the
    queue, where any worker may take them.
    """

    def __init__(self, max_items: int, max_tokens: int) -> None:
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._inside: dict[object, int] = {}
        self._changed = asyncio.Event()

    @property
    def is_there(self) -> bool:
        return len(self._inside) < self._max_items and sum(self._inside.values()) < self._max_tokens

    async def wait(self) -> None:
        while not self.is_there:
            self._changed.clear()
            await self._changed.wait()

    def enter(self, item: object, num_tokens: int) -> None:
        self._inside[item] = num_tokens

    def leave(self, item: object) -> None:
        self._inside.pop(item, None)
        self._changed.set()


class PulledContext:
    """The RequestContext of a request from the queue: stopped when the pusher cancels it or refuses the answer."""

    def __init__(self, request_id: str | None) -> None:
        self._id = request_id
        self._is_stopped = False

    def id(self) -> str | None:
        return self._id

    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        self._is_stopped = True

    async def on_cancel(self, message: Msg) -> None:
        self.stop()


class Puller:
    """Pulls items and runs them, from `start` until `stop`."""

    def __init__(self, broker: Broker, instance_id: int, room: Room, generate: Generate) -> None:
        """`generate` gets phase requests of the kind "prefill", and notices."""
        self._broker = broker
        self._limits = broker.limits
        self._instance_id = instance_id
        self._room = room
        self._generate = generate
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._is_asking = False
        self._loop: asyncio.Task[None] | None = None

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Inside, pushers can recall what this worker has answered, also after `stop`."""
        return self._broker.listening(self._broker.names.puller(self._instance_id), self._take_notice)

    def start(self) -> None:
        self._loop = asyncio.create_task(self._pull(), name="prefill-queue")

    def stop(self) -> None:
        """Begin no further item."""
        self._stopping.set()
        if self._loop is not None and not self._is_asking:
            self._loop.cancel()

    async def drained(self) -> None:
        """After `stop`: wait until every item that was begun has ended."""
        if self._loop is not None:
            await asyncio.wait({self._loop})
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Stop and cancel the items that were begun."""
        self.stop()
        tasks = [*self._tasks, *([self._loop] if self._loop is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull(self) -> None:
        while not self._stopping.is_set():
            await self._room.wait()
            await self._broker.wait_until_usable()
            try:
                message = await self._ask()
            except Exception:  # this worker is in discovery: requests wait for what it pulls
                log.exception("pulling from the prefill queue failed; it is tried again")
                await asyncio.sleep(_PULL_SECONDS)
                continue
            if message is None:
                continue
            if self._stopping.is_set():
                await _settle(message.nak())
            else:
                self._begin(message)

    async def _ask(self) -> Msg | None:
        """The next item. `stop` must not cancel this: JetStream would count an item on its way as delivered."""
        self._is_asking = True
        try:
            return await self._broker.pull(_PULL_SECONDS)
        finally:
            self._is_asking = False

    def _begin(self, message: Msg) -> None:
        try:
            item: Item = decode(message.data, Item)
        except UnreadableError as error:
            log.warning("an unreadable item in the prefill queue is dropped: %s", error)
            task = asyncio.create_task(_settle(message.term()))
        else:
            task = asyncio.create_task(self._serve(message, item))
            self._room.enter(task, _num_tokens(item))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.leave(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a queued prefill failed unexpectedly", exc_info=task.exception())

    async def _take_notice(self, message: Msg) -> None:
        try:
            notice = decode_request(decode(message.data, dict[str, Any]))
            if notice.phase_request is None or not notice.phase_request.is_notice:
                raise InvalidRequestError("only a notice may come there")
            async with aclosing(self._generate(notice, PulledContext(None))) as chunks:
                async for _ in chunks:
                    pass
            await self._broker.send(message.reply, YES)
        except (UnreadableError, DisaggError) as error:
            log.warning("a notice about a queued prefill is dropped: %s", error)

    async def _serve(self, message: Msg, item: Item) -> None:
        attempt = message.metadata.num_delivered
        may_be_offered_again = attempt < self._limits.offers
        if may_be_offered_again and self._instance_id in (*item.avoid, *item.skipped):
            await _settle(message.nak(_OFFER_AGAIN_SECONDS))
            return
        context = PulledContext(item.request_id)
        try:
            async with self._broker.listening(self._broker.names.cancel(item.id), context.on_cancel):
                reply = await self._send(item, Claim(item.id, attempt, self._instance_id))
                if reply is Reply.YES:
                    async with self._beating(message, item, attempt):
                        await self._run(item, attempt, context)
        except QueueUnusableError:
            reply = Reply.NONE
        if reply is Reply.NONE and may_be_offered_again:
            # The pusher may be busy, or the connection to NATS may come back.
            await _settle(message.nak(self._limits.ack))
            return
        if reply is not Reply.YES:
            log.info("request %s: its pusher does not wait for this prefill any more", item.request_id)
        await _settle(message.ack())

    async def _run(self, item: Item, attempt: int, context: PulledContext) -> None:
        """Send the pusher an answer or an error. When the pusher does not take the answer, release the KV."""
        try:
            request = self._read(item)
            async with aclosing(self._generate(request, context)) as chunks:
                async for chunk in chunks:
                    if not await self._may_be_taken(item, Answer(item.id, attempt, encode_chunk(chunk))):
                        # The prefill phase looks at this when it goes on, and then keeps and releases the handoff.
                        context.stop()
        except DisaggError as error:
            if not context.is_stopped():
                log.warning("request %s: %s: %s", item.request_id, type(error).__name__, error)
            await self._send(item, Failed(item.id, attempt, error.category, str(error)[:MAX_ERROR_CHARS]))
        except Exception as error:
            # A bug of ours fails this request, not the worker.
            log.exception("request %s failed unexpectedly", item.request_id)
            text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            await self._send(item, Failed(item.id, attempt, DisaggError.category, text))

    def _read(self, item: Item) -> GenerateRequest:
        request = decode_request(item.request)
        kind = request.phase_request.kind if request.phase_request is not None else "whole"
        if kind != "prefill":
            raise InvalidRequestError(
                f"the prefill queue takes prefill requests only; this item asks for {kind!r}"
            )
        if self._instance_id in item.avoid:
            raise PeerUnavailableError("no other prefill worker takes this request")
        return request

    async def _may_be_taken(self, item: Item, answer: Answer) -> bool:
        """False when the pusher certainly does not take the handoff. A pusher that is silent may hang and take it
        later; if it does not, the lease ends by itself. When NATS is gone, all pushed items are void.
        """
        try:
            reply = await self._send(item, answer)
        except QueueUnusableError as error:  # with the logprobs of a long prompt it may be too large
            await self._send(item, Failed(item.id, answer.attempt, TOO_LARGE, str(error)))
            return False
        if reply is Reply.NONE:
            # The pusher may have died while the answer was on its way: then this Beat has no receiver.
            reply = await self._send(item, Beat(item.id, answer.attempt))
            return reply is not Reply.NO_RECEIVER and self._broker.is_usable
        return reply is Reply.YES

    async def _send(self, item: Item, message: FromPuller) -> Reply:
        """Send a message to the item's pusher and return its reply."""
        pusher = self._broker.names.pusher(item.pusher)
        try:
            data = encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise DisaggError(f"the answer cannot be sent: {error}") from error
        return await self._broker.ask(pusher, data)

    @contextlib.asynccontextmanager
    async def _beating(self, message: Msg, item: Item, attempt: int) -> AsyncIterator[None]:
        """Inside, JetStream and the pusher are told again and again that the prefill still runs."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(self._limits.beat)
                await _settle(message.in_progress())
                await self._broker.send(
                    self._broker.names.pusher(item.pusher), encode(Beat(item.id, attempt))
                )

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()


async def _settle(message: Awaitable[None]) -> None:
    """Send JetStream a message about an item. If it is lost, the item is delivered again, and its pusher decides."""
    with contextlib.suppress(*NATS_ERRORS):
        await preserve_cancellation(message)


def _num_tokens(item: Item) -> int:
    """The number of prompt tokens of an item that is not validated yet."""
    tokens = item.request.get("token_ids")
    if isinstance(tokens, bytes):
        return len(tokens) // 4
    return len(tokens) if isinstance(tokens, list) else 0


class DepthWatch:
    """A QueueDepth: the number of waiting items and the age of the oldest one, as a task that runs from `start` until
    `stop` asks for them.
    """

    def __init__(self, broker: Broker, own_ages: Callable[[], Sequence[float]]) -> None:
        """`own_ages`: for how many seconds each item of this worker has waited. They count beside JetStream's, to which
        an item does not wait any more once it is delivered to a worker, even one that hangs.
        """
        self._broker = broker
        self._own_ages = own_ages
        self._num_waiting = 0
        #: (place of the oldest item, when it was pushed)
        self._oldest: tuple[int, float] | None = None
        #: When that is asked for again: an item may leave, and the next one wait, with the place unchanged.
        self._oldest_until = 0.0
        self._task: asyncio.Task[None] | None = None

    def depth(self) -> int:
        """The number of prefills that no worker has begun. A queue that cannot be reached counts as empty."""
        known = self._num_waiting if self._broker.is_usable else 0
        return max(known, len(self._own_ages()))

    def age(self) -> float:
        """Seconds for which the oldest prefill has waited; 0 when none waits."""
        oldest = self._oldest if self._broker.is_usable else None
        return max(0.0, time.time() - oldest[1] if oldest is not None else 0.0, *self._own_ages())

    async def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="prefill-queue-depth")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while True:
            await self._broker.wait_until_usable()
            try:
                await self._update()
            except Exception as error:
                # A depth that stays as it is would keep every request away from the queue, or none.
                self._num_waiting, self._oldest = 0, None
                if not isinstance(error, QueueUnusableError):
                    log.exception("looking at the prefill queue failed; it counts as empty")
            await asyncio.sleep(_ASK_SECONDS)

    async def _update(self) -> None:
        self._num_waiting, place = await self._broker.waiting()
        if not self._num_waiting:
            self._oldest = None
        elif self._oldest is None or self._oldest[0] != place or time.monotonic() > self._oldest_until:
            self._oldest_until = time.monotonic() + _OLDEST_SECONDS
            pushed_at = await self._broker.pushed_at(place)
            self._oldest = (place, pushed_at) if pushed_at is not None else None


class NatsPrefillQueue:
    """As `NoPrefillQueue`."""

    def __init__(self, config: WorkerConfig, broker: Broker) -> None:
        self._config = config
        self._broker = broker
        self.client = QueueClient(broker, config.queue_timeout)
        self._watch = DepthWatch(broker, self.client.waiting_ages)
        self._puller: Puller | None = None
        self._has_left = False
        self._subscriptions = contextlib.AsyncExitStack()

    @classmethod
    async def open(cls, config: WorkerConfig, kind: str, limits: QueueLimits | None) -> NatsPrefillQueue:
        broker = await Broker.connect(config.nats_server, Names.of(config, kind), limits)
        queue = cls(config, broker)
        try:
            await queue._subscriptions.enter_async_context(queue.client.listening())
        except BaseException:
            await broker.close()
            raise
        await queue._watch.start()
        return queue

    def depth(self) -> int:
        return self._watch.depth()

    async def start(self, generate: Generate, instance_id: int, endpoint: Any) -> None:
        expose(registry_of(QueueMetrics(self._watch.depth, self._watch.age)), endpoint, self._config)
        if self._puller is not None:  # of the instance that this worker was before
            await self._puller.close()
        if self._config.role is Role.PREFILL and not self._has_left:
            room = Room(self._config.max_batch_size, self._config.max_num_tokens)
            self._puller = Puller(self._broker, instance_id, room, generate)
            await self._subscriptions.enter_async_context(self._puller.listening())
            self._puller.start()

    async def leave(self) -> None:
        self._has_left = True
        if self._puller is not None:
            self._puller.stop()

    async def drained(self) -> None:
        if self._puller is not None:
            await self._puller.drained()

    async def aclose(self) -> None:
        await self._watch.stop()
        if self._puller is not None:
            await self._puller.close()
        await self._subscriptions.aclose()
        await self._broker.close()
