"""The connection to NATS: the only module that makes its client. What it cannot do ends in an error of ours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Self, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, BadRequestError, NotFoundError, ServiceUnavailableError

from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.errors import ConfigError, OverloadedError, QueueUnusableError
from trtllm_disagg.kv_transfer.listener import RateLimitedLog
from trtllm_disagg.prefill_queue.messages import CONSUMER, MAX_BYTES, NO, YES, Names

log = logging.getLogger(__name__)

T = TypeVar("T")

_RECONNECT_SECONDS = 0.2
#: A server that hangs is given up after two of these.
_PING_SECONDS = 2
#: No request waits so long: what is older is left of pushers that are gone, where no worker pulls.
_MAX_AGE_SECONDS = 3600.0
_MAX_ITEMS = 10_000
_MAX_STREAM_BYTES = 256 << 20
_NAME_IN_USE, _TOO_MANY = 10058, (10077, 10054, 10122)

#: Of its client; a TimeoutError is an OSError.
NATS_ERRORS = (nats.errors.Error, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Seconds, and how often an item may change hands."""

    #: To reach the server at the start.
    connect: float = 3.0
    #: For an answer of NATS, or of another worker.
    reply: float = 2.0
    #: A prefill worker that is silent about an item for longer has lost it.
    ack: float = 3.0
    #: Between two words of a prefill worker about an item that it is at.
    beat: float = 1.0
    #: An item that so many workers have lost is not given to another one.
    claims: int = 3
    #: An item that a worker must not run is offered again so often before it fails.
    offers: int = 40


class NatsClient(Client):
    """NATS's client takes tls:// for a wish; here it is a condition."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """The server's first word, before it is told anything. Without this, one that offers no TLS would be sent the
        password and all else in the clear.
        """
        wants_tls = self._current_server is not None and self._current_server.uri.scheme == "tls"
        if wants_tls and not info.get("tls_required"):
            raise nats.errors.Error("this one offers no TLS")
        await super()._process_info(info, initial_connection=initial_connection)


async def preserve_cancellation(answer: Awaitable[T]) -> T:
    """The result of `answer`; a cancel of this task that comes meanwhile is raised here in any case.

    `asyncio.wait_for` of Python 3.11 forgets a cancel that comes in the same turn as its result, and NATS's client
    makes another error of some. Waiting for the cancelled task would then never end.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await answer
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Raises TimeoutError. NATS's client can lose a cancel and hang after it, so its end is not waited for."""
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise TimeoutError
        task.result()
    finally:
        task.cancel()


class Reply(Enum):
    YES = "yes"
    NO = "no"
    #: There is no such subscriber.
    NO_RECEIVER = "no receiver"
    #: It did not come in time, or NATS is gone.
    NONE = "none"


class Broker:
    """One connection of this worker, and the stream of its queue; its owner calls `close`."""

    def __init__(self, names: Names, limits: QueueLimits, client: NatsClient) -> None:
        self.names = names
        self.limits = limits
        self._client = client
        self._stream = self._client.jetstream(timeout=limits.reply)
        self._pulling: JetStreamContext.PullSubscription | None = None
        self._usable = asyncio.Event()
        self._on_lost: list[Callable[[str], None]] = []
        #: When the queue was made, by NATS's clock: a later time is another queue.
        self._born: datetime | None = None
        self._num_made = 0
        self._returning: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, servers: str, names: Names, limits: QueueLimits | None = None, client: NatsClient | None = None
    ) -> Self:
        """`client`: instead of NATS's. Raises ConfigError when there is no such NATS server, or it has no JetStream."""
        broker = cls(names, limits or QueueLimits(), client or NatsClient())
        try:
            await _within(broker.limits.connect, broker._open(servers.split(",")))
        except NATS_ERRORS as error:
            reason = _why_not(error, broker._client.last_error)
            await broker.close()
            raise ConfigError.bad_value(
                flag_of("nats_server"),
                _without_password(servers),
                f"nats://host:port of a NATS server that is there and has JetStream (nats-server -js): {reason}",
            ) from None
        broker._usable.set()
        return broker

    @property
    def is_usable(self) -> bool:
        return self._usable.is_set()

    async def wait_until_usable(self) -> None:
        await self._usable.wait()

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """It is told why what was pushed is lost."""
        self._on_lost.append(callback)

    async def close(self) -> None:
        self._usable.clear()
        if self._returning is not None:
            self._returning.cancel()
        with contextlib.suppress(*NATS_ERRORS):
            await _within(self.limits.reply, self._client.close())

    # -- the stream

    async def push(self, data: bytes) -> int:
        """Its place in the stream. Raises QueueUnusableError or OverloadedError."""
        if len(data) > min(self._client.max_payload, MAX_BYTES):
            raise QueueUnusableError(
                f"a request of {len(data)} bytes does not fit the prefill queue: NATS takes "
                f"{self._client.max_payload} (max_payload)"
            )
        with _unusable():
            try:
                ack = await preserve_cancellation(self._stream.publish(self.names.items, data))
            except APIError as error:
                if error.err_code in _TOO_MANY:
                    raise OverloadedError("the prefill queue is full") from error
                raise
        return ack.seq

    async def withdraw(self, sequence: int) -> None:
        """As far as possible; an item without a waiting request is skipped anyway."""
        with contextlib.suppress(*NATS_ERRORS):
            await preserve_cancellation(self._stream.delete_msg(self.names.stream, sequence))

    async def pull(self, seconds: float) -> Msg | None:
        """The next item, None when there is none in this time, or NATS is gone."""
        try:
            if self._pulling is None:
                self._pulling = await self._stream.pull_subscribe_bind(CONSUMER, self.names.stream)
            (message,) = await preserve_cancellation(self._pulling.fetch(1, timeout=seconds))
        except TimeoutError:
            return None
        except NATS_ERRORS as error:
            log.warning("the prefill queue cannot be pulled from: %s", error)
            await asyncio.sleep(_RECONNECT_SECONDS)
            return None
        assert isinstance(message, Msg)
        return message

    async def waiting(self) -> tuple[int, int]:
        """(items that no worker has been given yet, place of the oldest one). Raises QueueUnusableError."""
        if not self.is_usable:
            raise QueueUnusableError("the prefill queue cannot be reached: NATS is gone")
        num_made = self._num_made
        with _unusable():
            try:
                consumer = await preserve_cancellation(
                    self._stream.consumer_info(self.names.stream, CONSUMER, timeout=self.limits.reply)
                )
            except NotFoundError:
                consumer = None
        if consumer is None or self._is_another(consumer):
            # After NATS was gone `_return` makes the queue, and may have overtaken this answer.
            if self.is_usable and self._num_made == num_made:
                await self._make_anew()
            return 0, 1
        delivered = consumer.delivered.stream_seq if consumer.delivered is not None else 0
        return consumer.num_pending or 0, delivered + 1

    async def pushed_at(self, sequence: int) -> float | None:
        """When the first item from this place on was pushed, in seconds since the epoch by NATS's clock."""
        try:
            message = await preserve_cancellation(
                self._stream.get_msg(self.names.stream, sequence, subject=self.names.items, next=True)
            )
        except NATS_ERRORS:
            return None
        return message.time.timestamp() if message.time is not None else None

    # -- plain messages

    @contextlib.asynccontextmanager
    async def listening(self, subject: str, hear: Callable[[Msg], Awaitable[None]]) -> AsyncIterator[None]:
        """What is asked or pushed inside comes after this. Raises QueueUnusableError."""
        with _unusable():
            subscription = await self._client.subscribe(subject, cb=hear)
        try:
            yield
        finally:
            with contextlib.suppress(*NATS_ERRORS):
                await subscription.unsubscribe()

    async def tell(self, subject: str, data: bytes) -> None:
        """Best effort."""
        with contextlib.suppress(*NATS_ERRORS):
            await self._client.publish(subject, data)

    async def ask(self, subject: str, data: bytes) -> Reply:
        try:
            answer = await preserve_cancellation(
                self._client.request(subject, data, timeout=self.limits.reply)
            )
        except nats.errors.NoRespondersError:
            return Reply.NO_RECEIVER
        except NATS_ERRORS:
            return Reply.NONE
        return {YES: Reply.YES, NO: Reply.NO}.get(answer.data, Reply.NONE)

    # -- the connection

    async def _open(self, servers: list[str]) -> None:
        await self._client.connect(
            servers=servers,
            name="trtllm-disagg",
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RECONNECT_SECONDS,  # type: ignore[arg-type]
            ping_interval=_PING_SECONDS,
            max_outstanding_pings=2,
            # What cannot be sent now fails now.
            pending_size=0,
            error_cb=_noted,
            disconnected_cb=self._lost,
            reconnected_cb=self._back,
        )
        await self._make_stream()

    async def _make_stream(self) -> None:
        """Idempotent. Each item is for one worker, and comes back when that one does not finish it."""
        stream = api.StreamConfig(
            name=self.names.stream,
            subjects=[self.names.items],
            retention=api.RetentionPolicy.WORK_QUEUE,
            discard=api.DiscardPolicy.NEW,
            max_msgs=_MAX_ITEMS,
            max_bytes=_MAX_STREAM_BYTES,
            max_msg_size=MAX_BYTES,
            max_age=_MAX_AGE_SECONDS,
            storage=api.StorageType.FILE,
        )
        try:
            await self._stream.add_stream(stream)
        except BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            await self._stream.update_stream(stream)
        consumer = api.ConsumerConfig(
            durable_name=CONSUMER,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=self.limits.ack,
            max_deliver=-1,
            max_ack_pending=-1,
        )
        self._born = (await self._stream.add_consumer(self.names.stream, consumer)).created
        self._num_made += 1

    def _is_another(self, consumer: api.ConsumerInfo) -> bool:
        """Than the one of this connection. An older one is not: a server that starts may answer before it has restored
        what it had, and then has that.
        """
        if consumer.created is None or self._born is None:
            return consumer.created != self._born
        return consumer.created > self._born

    async def _make_anew(self) -> None:
        """The stream was deleted in NATS, with what waited in it. Raises QueueUnusableError."""
        log.warning("the prefill queue was deleted in NATS, and is made anew")
        with _unusable():
            await preserve_cancellation(self._make_stream())
        self._tell_lost("it was deleted in NATS")

    async def _lost(self) -> None:
        if not self._usable.is_set():
            return
        log.warning("NATS is gone: no prefill goes through the queue until it is back")
        self._usable.clear()
        self._tell_lost("NATS is gone (--nats-server)")

    def _tell_lost(self, why: str) -> None:
        for callback in self._on_lost:
            callback(why)

    async def _back(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
        self._returning = asyncio.create_task(self._return())

    async def _return(self) -> None:
        """It may be another server, or the same one without its memory."""
        warn = RateLimitedLog(log)
        while self._client.is_connected:
            try:
                await preserve_cancellation(self._make_stream())
            except NATS_ERRORS as error:
                warn("NATS is back, but has no stream yet: %s", error)
                await asyncio.sleep(_RECONNECT_SECONDS)
                continue
            log.info("NATS is back")
            self._usable.set()
            return


@contextlib.contextmanager
def _unusable() -> Iterator[None]:
    """Raises QueueUnusableError for what NATS's client raises."""
    try:
        yield
    except NATS_ERRORS as error:
        raise QueueUnusableError(
            f"the prefill queue cannot be reached: {error or type(error).__name__}"
        ) from error


async def _noted(error: Exception) -> None:
    log.debug("NATS: %s: %s", type(error).__name__, error)


def _why_not(error: BaseException, earlier: BaseException | None) -> str:
    if isinstance(error, (ServiceUnavailableError, nats.errors.NoRespondersError)):
        return "this one has none"
    return str(error) or str(earlier or "no answer")


def _without_password(servers: str) -> str:
    return re.sub(r"//[^/@,]*@", "//***@", servers)
