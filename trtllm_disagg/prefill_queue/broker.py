"""Connects to NATS, and raises its failures as DisaggErrors. Only this module makes NATS' client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import BadRequestError, NotFoundError, ServiceUnavailableError

from trtllm_disagg.config.settings import without_password
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.errors import ConfigError, QueueUnusableError
from trtllm_disagg.prefill_queue.tickets import CONSUMER, MAX_BYTES, Answer, Names

log = logging.getLogger(__name__)

T = TypeVar("T")

_RECONNECT_SECONDS = 0.2
#: A server that misses two pings is disconnected.
_PING_SECONDS = 2
#: No request waits this long: an older ticket's asker is gone, and no worker takes tickets.
_MAX_AGE_SECONDS = 3600.0
_MAX_TICKETS = 10_000
#: The number of unanswered pushes in a row that counts as a failure.
_MAX_UNANSWERED = 2
_NAME_IN_USE = 10058

#: Errors of NATS' client; TimeoutError is an OSError.
NATS_ERRORS = (nats.errors.Error, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Times in seconds."""

    #: To reach the server at the start.
    connect: float = 3.0
    #: For a reply of NATS or an asker.
    reply: float = 2.0
    #: After this silence of a prefill worker, JetStream delivers its ticket again.
    ack: float = 3.0
    #: After two unanswered pushes, one request tries again after each pause.
    pause: float = 5.0
    #: Between two checks that a waiting request still has a prefill worker.
    look: float = 0.5
    #: A prefill worker keeps room for this long for the call of an asker that accepted its offer.
    call: float = 2.0


class NatsClient(Client):
    """NATS' client, but tls:// requires TLS; for the original it is a preference."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Check the server's first message, before the password and all else would go unencrypted to a server without
        TLS.
        """
        wants_tls = self._current_server is not None and self._current_server.uri.scheme == "tls"
        if wants_tls and not info.get("tls_required"):
            raise nats.errors.Error("this server offers no TLS")
        await super()._process_info(info, initial_connection=initial_connection)


async def preserve_cancellation(answer: Awaitable[T]) -> T:
    """The result of `answer`. Raises CancelledError if this task is cancelled meanwhile.

    `asyncio.wait_for` of Python 3.11 loses a cancel in the tick of its result, and NATS' client turns some cancels into
    other errors. Waiting for the cancelled task would then never end.
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
    """Raises TimeoutError. Does not await the cancelled work, since NATS' client can lose a cancel and hang."""
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise TimeoutError
        task.result()
    finally:
        task.cancel()


class Broker:
    """This worker's connection, and its queue's stream. Its owner calls `close`."""

    def __init__(self, names: Names, limits: QueueLimits, client: NatsClient) -> None:
        self.names = names
        self.limits = limits
        #: Called when the connection is lost: pushed tickets get no more offers.
        self.on_lost: Callable[[], None] = lambda: None
        self._client = client
        self._stream = self._client.jetstream(timeout=limits.reply)
        self._pulling: JetStreamContext.PullSubscription | None = None
        self._usable = asyncio.Event()
        #: The number of unanswered pushes in a row, as with a full disk, and when the next may try.
        self._num_unanswered, self._again_at = 0, 0.0

    @classmethod
    async def connect(
        cls, servers: str, names: Names, limits: QueueLimits | None = None, client: NatsClient | None = None
    ) -> Self:
        """`client` replaces a new one. Raises ConfigError if no NATS server with JetStream can be reached."""
        broker = cls(names, limits or QueueLimits(), client or NatsClient())
        try:
            await _within(broker.limits.connect, broker._open(servers.split(",")))
        except NATS_ERRORS as error:
            reason = _why_not(error, broker._client.last_error)
            await broker.close()
            raise ConfigError.bad_value(
                flag_of("nats_server"),
                without_password(servers),
                f"nats://host:port of a running NATS server with JetStream (nats-server -js): {reason}",
            ) from None
        broker._usable.set()
        return broker

    @property
    def is_usable(self) -> bool:
        return self._usable.is_set()

    def require_usable(self) -> None:
        """Raises QueueUnusableError if NATS is gone or does not reply to pushes."""
        if not self.is_usable:
            raise QueueUnusableError("the prefill queue cannot be reached: NATS is gone (--nats-server)")
        if self._num_unanswered >= _MAX_UNANSWERED and time.monotonic() < self._again_at:
            raise QueueUnusableError("the prefill queue takes nothing now: NATS does not reply to pushes")

    async def wait_until_usable(self) -> None:
        await self._usable.wait()

    async def close(self) -> None:
        self._usable.clear()
        with contextlib.suppress(*NATS_ERRORS):
            await _within(self.limits.reply, self._client.close())

    # -- the stream

    async def push(self, data: bytes) -> int:
        """Push a ticket and return its place in the stream. Raises QueueUnusableError."""
        self._again_at = time.monotonic() + self.limits.pause
        with _unusable():
            try:
                place = (await preserve_cancellation(self._stream.publish(self.names.tickets, data))).seq
            except TimeoutError:
                self._num_unanswered += self.is_usable  # else the connection was lost
                if self._num_unanswered == _MAX_UNANSWERED:
                    log.warning(
                        "NATS does not reply to pushes, as with a full disk: requests go on without the prefill queue; "
                        "one tries it every %g s",
                        self.limits.pause,
                    )
                raise
        self._num_unanswered = 0
        return place

    async def withdraw(self, place: int) -> None:
        """Delete a ticket, best effort: prefill workers drop tickets of requests that no longer wait."""
        with contextlib.suppress(*NATS_ERRORS):
            await preserve_cancellation(self._stream.delete_msg(self.names.stream, place))

    async def pull(self, seconds: float) -> Msg | None:
        """The next ticket; None when none comes within `seconds`. Raises NATS_ERRORS."""
        if self._pulling is None:
            self._pulling = await self._stream.pull_subscribe_bind(CONSUMER, self.names.stream)
        message: Msg | None = None
        with contextlib.suppress(TimeoutError):
            (message,) = await preserve_cancellation(self._pulling.fetch(1, timeout=seconds))
        return message

    async def state(self) -> api.StreamState:
        """The stream's state. Makes the stream again if it is gone. Raises QueueUnusableError."""
        with _unusable():
            with contextlib.suppress(NotFoundError):
                stream = await preserve_cancellation(self._stream.stream_info(self.names.stream))
                if stream.state.consumer_count:
                    return stream.state
            log.warning("NATS has lost the prefill queue; creating it again")
            await preserve_cancellation(self._make_stream())
            return (await preserve_cancellation(self._stream.stream_info(self.names.stream))).state

    async def pushed_at(self, place: int) -> float | None:
        """When the first ticket at or after `place` was pushed, in seconds since the epoch by NATS' clock."""
        try:
            message = await preserve_cancellation(
                self._stream.get_msg(self.names.stream, place, subject=self.names.tickets, next=True)
            )
        except NATS_ERRORS:
            return None
        return message.time.timestamp() if message.time is not None else None

    # -- plain messages

    @contextlib.asynccontextmanager
    async def listening(self, subject: str, handle: Callable[[Msg], Awaitable[None]]) -> AsyncIterator[None]:
        """Subscribe for the block; NATS subscribes before all that is sent inside. Raises QueueUnusableError."""
        with _unusable():
            subscription = await self._client.subscribe(subject, cb=handle)
        try:
            yield
        finally:
            with contextlib.suppress(*NATS_ERRORS):
                await subscription.unsubscribe()

    async def send(self, subject: str, data: bytes) -> None:
        """Send a message that has no reply, best effort."""
        with contextlib.suppress(*NATS_ERRORS, ValueError):
            await self._client.publish(subject, data)

    async def ask(self, subject: str, data: bytes) -> Answer | None:
        """The asker's answer to an offer; None when it is silent or gone."""
        try:
            request = self._client.request(subject, data, timeout=self.limits.reply)
            return Answer((await preserve_cancellation(request)).data)
        except (*NATS_ERRORS, ValueError):
            return None

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
        """Idempotent. JetStream delivers each ticket to one worker, and again if that worker is silent."""
        stream = api.StreamConfig(
            name=self.names.stream,
            subjects=[self.names.tickets],
            retention=api.RetentionPolicy.WORK_QUEUE,
            discard=api.DiscardPolicy.NEW,
            max_msgs=_MAX_TICKETS,
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
        await self._stream.add_consumer(self.names.stream, consumer)

    async def _lost(self) -> None:
        if self.is_usable:
            log.warning("NATS is gone: requests go on without the prefill queue until it is back")
            self._usable.clear()
            self.on_lost()

    async def _back(self) -> None:
        log.info("NATS is back")
        self._usable.set()


@contextlib.contextmanager
def _unusable() -> Iterator[None]:
    """Turns errors of NATS' client into QueueUnusableError."""
    try:
        yield
    except NATS_ERRORS as error:
        reason = error or type(error).__name__
        raise QueueUnusableError(f"the prefill queue cannot be reached: {reason}") from error


async def _log_error(error: Exception) -> None:
    log.debug("NATS: %s: %s", type(error).__name__, error)


def _why_not(error: BaseException, earlier: BaseException | None) -> str:
    if isinstance(error, (ServiceUnavailableError, nats.errors.NoRespondersError)):
        return "this server has no JetStream"
    return str(error) or str(earlier or "") or "no answer"
