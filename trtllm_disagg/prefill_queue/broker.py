"""The connection to NATS: the only module that makes its client. Its failures are raised as DisaggErrors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
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

from trtllm_disagg.config.settings import without_password
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.errors import ConfigError, OverloadedError, QueueUnusableError
from trtllm_disagg.prefill_queue.messages import CONSUMER, MAX_BYTES, NO, YES, Names
from trtllm_disagg.processes.reports import RateLimitedLog

log = logging.getLogger(__name__)

T = TypeVar("T")

_RECONNECT_SECONDS = 0.2
#: The connection to a server that misses two pings is closed.
_PING_SECONDS = 2
#: No request waits this long: an older item is from a pusher that is gone, in a queue that no worker pulls from.
_MAX_AGE_SECONDS = 3600.0
_MAX_ITEMS = 10_000
_MAX_STREAM_BYTES = 256 << 20
#: So many pushes in a row without a reply are no accident.
_MOST_UNANSWERED = 2
_NAME_IN_USE, _TOO_MANY = 10058, (10077, 10054, 10122)

#: Errors of NATS' client; TimeoutError is an OSError.
NATS_ERRORS = (nats.errors.Error, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Times in seconds, and how often an item may change hands."""

    #: Time to reach the server at the start.
    connect: float = 3.0
    #: Time for a reply of NATS, or of another worker.
    reply: float = 2.0
    #: JetStream delivers an item again when its prefill worker is silent about it for longer than this.
    ack: float = 3.0
    #: After NATS has left a push without a reply, how long no other request tries.
    pause: float = 5.0
    #: Time between two Beats of a prefill worker that runs an item.
    beat: float = 1.0
    #: How often a request in the queue looks whether there is still a prefill worker.
    look: float = 0.5
    #: The item fails when this many workers have claimed and lost it.
    claims: int = 3
    #: An item is given back this often, by workers that must not run it, before it fails.
    offers: int = 40

    @property
    def silence(self) -> float:
        """A prefill worker that runs an item may miss two Beats."""
        return 3 * self.beat


class NatsClient(Client):
    """NATS' client, where tls:// requires TLS; the original takes it as a preference."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Handles the server's first message, before anything is sent. Without the check, the password and all else
        would go unencrypted to a server without TLS.
        """
        wants_tls = self._current_server is not None and self._current_server.uri.scheme == "tls"
        if wants_tls and not info.get("tls_required"):
            raise nats.errors.Error("this server offers no TLS")
        await super()._process_info(info, initial_connection=initial_connection)


async def preserve_cancellation(answer: Awaitable[T]) -> T:
    """The result of `answer`. Raises CancelledError whenever this task is cancelled meanwhile.

    `asyncio.wait_for` of Python 3.11 loses a cancel that comes in the same turn as its result, and NATS' client
    turns some into another error. Waiting for the cancelled task would then never end.
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
    """Raises TimeoutError. NATS' client can lose a cancel and hang after it, so the cancelled work is not awaited."""
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
    #: The subject has no subscriber.
    NO_RECEIVER = "no receiver"
    #: No reply came in time, or NATS is gone.
    NONE = "none"


class _Pushes:
    """Whether NATS replies to pushes. After two without a reply, one request tries after each pause, no other waits."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._num_unanswered = 0
        self._again_at = 0.0

    @property
    def may_begin(self) -> bool:
        return self._num_unanswered < _MOST_UNANSWERED or time.monotonic() >= self._again_at

    def begin(self) -> None:
        self._again_at = time.monotonic() + self._pause

    def answered(self) -> None:
        if self._num_unanswered >= _MOST_UNANSWERED:
            log.info("NATS replies to pushes again")
        self._num_unanswered = 0

    def unanswered(self) -> None:
        self._num_unanswered += 1
        if self._num_unanswered == _MOST_UNANSWERED:
            log.warning(
                "NATS does not reply to pushes, as with a full disk: requests go on without the prefill queue; one "
                "tries it every %g s",
                self._pause,
            )
        self.begin()


class Broker:
    """One connection of this worker, and the stream of its queue; its owner calls `close`."""

    def __init__(self, names: Names, limits: QueueLimits, client: NatsClient) -> None:
        self.names = names
        self.limits = limits
        self._client = client
        self._stream = self._client.jetstream(timeout=limits.reply)
        self._pulling: JetStreamContext.PullSubscription | None = None
        self._usable = asyncio.Event()
        self._pushes = _Pushes(self.limits.pause)
        self._on_lost: list[Callable[[str], None]] = []
        #: When the queue's consumer was made, by NATS' clock: a later time means another queue.
        self._created_at: datetime | None = None
        self._num_made = 0
        self._returning: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, servers: str, names: Names, limits: QueueLimits | None = None, client: NatsClient | None = None
    ) -> Self:
        """`client`: in place of a new one. Raises ConfigError when no NATS server with JetStream can be reached."""
        broker = cls(names, limits or QueueLimits(), client or NatsClient())
        try:
            await _within(broker.limits.connect, broker._open(servers.split(",")))
        except NATS_ERRORS as error:
            reason = _why_not(error, broker._client.last_error)
            await broker.close()
            raise ConfigError.bad_value(
                flag_of("nats_server"),
                without_password(servers),
                f"nats://host:port of a NATS server that is there and has JetStream (nats-server -js): {reason}",
            ) from None
        broker._usable.set()
        return broker

    @property
    def is_usable(self) -> bool:
        return self._usable.is_set()

    @property
    def takes_items(self) -> bool:
        """It is usable, and NATS has not just left a push without a reply, as it does with a full disk."""
        return self.is_usable and self._pushes.may_begin

    async def wait_until_usable(self) -> None:
        await self._usable.wait()

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """`callback` is called with the reason when all pushed items are lost."""
        self._on_lost.append(callback)

    async def close(self) -> None:
        self._usable.clear()
        if self._returning is not None:
            self._returning.cancel()
        with contextlib.suppress(*NATS_ERRORS):
            await _within(self.limits.reply, self._client.close())

    # -- the stream

    async def push(self, data: bytes) -> int:
        """Push an item and return its place in the stream. Raises QueueUnusableError or OverloadedError."""
        self._require_fit("a request", data)
        self._pushes.begin()
        with _unusable():
            try:
                ack = await preserve_cancellation(self._stream.publish(self.names.items, data))
            except TimeoutError:
                if self.is_usable:  # else the connection was lost meanwhile
                    self._pushes.unanswered()
                raise
            except APIError as error:
                self._pushes.answered()
                if error.err_code in _TOO_MANY:
                    raise OverloadedError("the prefill queue is full") from error
                raise
        self._pushes.answered()
        return ack.seq

    async def withdraw(self, sequence: int) -> None:
        """Delete an item, best effort: prefill workers skip items that no request waits for."""
        with contextlib.suppress(*NATS_ERRORS):
            await preserve_cancellation(self._stream.delete_msg(self.names.stream, sequence))

    async def pull(self, seconds: float) -> Msg | None:
        """The next item; None when none comes within `seconds`, or NATS is gone."""
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
        """(number of items not yet delivered to a worker, place of the oldest one). Raises QueueUnusableError."""
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
            # When NATS comes back `_return` makes the queue, and may have done so since this answer was sent.
            if self.is_usable and self._num_made == num_made:
                await self._make_anew()
            return 0, 1
        delivered = consumer.delivered.stream_seq if consumer.delivered is not None else 0
        return consumer.num_pending or 0, delivered + 1

    async def pushed_at(self, sequence: int) -> float | None:
        """When the first item at or after this place was pushed, in seconds since the epoch by NATS' clock."""
        try:
            message = await preserve_cancellation(
                self._stream.get_msg(self.names.stream, sequence, subject=self.names.items, next=True)
            )
        except NATS_ERRORS:
            return None
        return message.time.timestamp() if message.time is not None else None

    # -- plain messages

    @contextlib.asynccontextmanager
    async def listening(self, subject: str, handle: Callable[[Msg], Awaitable[None]]) -> AsyncIterator[None]:
        """Subscribed inside: NATS gets all that is sent inside after the subscription. Raises QueueUnusableError."""
        with _unusable():
            subscription = await self._client.subscribe(subject, cb=handle)
        try:
            yield
        finally:
            with contextlib.suppress(*NATS_ERRORS):
                await subscription.unsubscribe()

    async def send(self, subject: str, data: bytes) -> None:
        """Send a message that has no reply, best effort."""
        with contextlib.suppress(*NATS_ERRORS):
            await self._client.publish(subject, data)

    def _require_fit(self, what: str, data: bytes) -> None:
        if len(data) > min(self._client.max_payload, MAX_BYTES):
            raise QueueUnusableError(
                f"{what} of {len(data)} bytes does not fit the prefill queue: NATS takes "
                f"{self._client.max_payload} (max_payload)"
            )

    async def ask(self, subject: str, data: bytes) -> Reply:
        """Raises QueueUnusableError for a message that is too large."""
        self._require_fit("an answer", data)
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
            # Without a connection a send fails at once.
            pending_size=0,
            error_cb=_log_error,
            disconnected_cb=self._lost,
            reconnected_cb=self._back,
        )
        await self._make_stream()

    async def _make_stream(self) -> None:
        """Idempotent. JetStream delivers each item to one worker, and again if that worker does not finish it."""
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
        self._created_at = (await self._stream.add_consumer(self.names.stream, consumer)).created
        self._num_made += 1

    def _is_another(self, consumer: api.ConsumerInfo) -> bool:
        """Whether the consumer is newer than this connection's. An older one is not another one: a server that starts
        may let this connection make a consumer before it has restored its own.
        """
        if consumer.created is None or self._created_at is None:
            return consumer.created != self._created_at
        return consumer.created > self._created_at

    async def _make_anew(self) -> None:
        """The stream was deleted in NATS, with all waiting items. Raises QueueUnusableError."""
        log.warning("the prefill queue was deleted in NATS, and is made anew")
        with _unusable():
            await preserve_cancellation(self._make_stream())
        self._notify_lost("it was deleted in NATS")

    async def _lost(self) -> None:
        if not self._usable.is_set():
            return
        log.warning("NATS is gone: no prefill goes through the queue until it is back")
        self._usable.clear()
        self._notify_lost("NATS is gone (--nats-server)")

    def _notify_lost(self, why: str) -> None:
        for callback in self._on_lost:
            callback(why)

    async def _back(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
        self._returning = asyncio.create_task(self._return())

    async def _return(self) -> None:
        """Make the stream again: the server may be another one, or may have lost its data."""
        warn = RateLimitedLog(log)
        while self._client.is_connected:
            try:
                await preserve_cancellation(self._make_stream())
            except Exception as error:  # no other task would make the queue usable again
                warn("NATS is back, but has no stream yet: %s: %s", type(error).__name__, error)
                await asyncio.sleep(_RECONNECT_SECONDS)
                continue
            log.info("NATS is back")
            self._usable.set()
            return


@contextlib.contextmanager
def _unusable() -> Iterator[None]:
    """Raises QueueUnusableError for errors of NATS' client."""
    try:
        yield
    except NATS_ERRORS as error:
        raise QueueUnusableError(
            f"the prefill queue cannot be reached: {error or type(error).__name__}"
        ) from error


async def _log_error(error: Exception) -> None:
    log.debug("NATS: %s: %s", type(error).__name__, error)


def _why_not(error: BaseException, earlier: BaseException | None) -> str:
    if isinstance(error, (ServiceUnavailableError, nats.errors.NoRespondersError)):
        return "this server has no JetStream"
    return str(error) or str(earlier or "") or "no answer"
