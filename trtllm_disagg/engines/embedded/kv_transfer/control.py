"""The control channel and the leases: an engine sends its metadata, and confirms that a lease holds before and after
a read.

Begin, read, finish: `Begin` refuses a read that would come too late, and extends the lease for the read; `Finish` is
answered HELD when the blocks were untouched meanwhile, so that the bytes read are exactly the leased prompt's KV. After
any other answer the receiver discards them. A forged, stale or foreign handle reads nothing, and can never put another
prompt's KV into an answer.

A lease holds the blocks of a finished prefill: until `Finish`, an explicit release, or its expiry.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from trtllm_disagg.engines.embedded.kv_transfer.access import PeerAuthentication, PeerGoneError
from trtllm_disagg.engines.embedded.kv_transfer.base import PeerMetadata
from trtllm_disagg.engines.embedded.kv_transfer.listener import (
    MAX_MESSAGE_BYTES,
    Limits,
    PeerListener,
    receive_message,
)
from trtllm_disagg.engines.embedded.kv_transfer.messages import (
    Begin,
    Finish,
    FromDecode,
    FromPrefill,
    GetMetadata,
    Release,
    Reply,
    Request,
)
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.processes.framing import AT_ONCE, UnreadableError, framed, receive_whole_frame
from trtllm_disagg.wire.kv_handle import UNREADABLE, KvHandle

_REMEMBERED = 1024
#: A client closes a connection that it has not used for this long: the server hangs up after `Limits.idle`.
_STALE_SECONDS = 60.0
#: The handler of each message type; its second argument is the peer's name.
MessageHandlers = Mapping[type, Callable[[Any, str], bytes]]
_requests = msgspec.msgpack.Decoder(Request)
_peer_metadata = msgspec.msgpack.Decoder(PeerMetadata)
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Lease:
    """Blocks that a sender keeps for a receiver: until `Finish`, an explicit release, or the expiry of the lease."""

    id: bytes
    request_id: int
    blocks: list[int]
    deadline: float  # time.monotonic() seconds
    digest: bytes = b""  # KvHandle.digest(), set when the handle is made
    begun: bool = False
    granted: float = 0.0


class LeaseTable:
    """Thread-safe. A lease leaves the table exactly once, whatever ends it first; only then may its blocks go.

    So when `finish` answers True, the blocks were untouched during everything that the receiver read before.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._by_id: dict[bytes, Lease] = {}
        self._by_request: dict[int, bytes] = {}
        self._ended: list[Lease] = []
        self._ended_early: deque[bytes] = deque(maxlen=_REMEMBERED)
        self.expired_total = 0

    def grant(self, request_id: int, blocks: list[int]) -> Lease:
        now = self._clock()
        lease = Lease(secrets.token_bytes(16), request_id, blocks, now + self.seconds, granted=now)
        with self._lock:
            self._by_id[lease.id] = lease
            self._by_request[request_id] = lease.id
        return lease

    def begin(self, lease_id: bytes, digest: bytes) -> bool:
        """The receiver is about to read: True when it may. The lease then has its whole time again, once: a
        receiver that begins over and over cannot keep the blocks for ever.
        """
        with self._lock:
            lease = self._held(lease_id, digest)
            if lease is not None and not lease.begun:
                lease.begun, lease.deadline = True, self._clock() + self.seconds
            return lease is not None

    def finish(self, lease_id: bytes, digest: bytes) -> bool:
        """The receiver has read: True when the lease was still held and is the one that the receiver means."""
        with self._lock:
            lease = self._held(lease_id, digest)
            if lease is not None:
                self._end(lease)
            return lease is not None

    def has_ended_early(self, lease_id: bytes) -> bool:
        """This lease expired, or was given back by either side, before a receiver had read. Only the last ones are
        remembered.
        """
        with self._lock:
            return lease_id in self._ended_early

    def release(self, lease_id: bytes) -> None:
        """The receiver does not want the blocks."""
        with self._lock:
            if lease := self._by_id.get(lease_id):
                self._end_early(lease)

    def release_request(self, request_id: int) -> bool:
        with self._lock:
            lease_id = self._by_request.get(request_id)
            if lease_id is None:
                return False
            self._end_early(self._by_id[lease_id])
            return True

    def take_ended(self) -> list[Lease]:
        """Leases that ended since the last call, expired ones included. Their blocks are the caller's to free."""
        now = self._clock()
        with self._lock:
            for lease in [lease for lease in self._by_id.values() if lease.deadline <= now]:
                self._expire(lease)
            ended, self._ended = self._ended, []
        return ended

    def next_deadline(self) -> float | None:
        with self._lock:
            return min((lease.deadline for lease in self._by_id.values()), default=None)

    def oldest(self) -> float | None:
        """When it was granted; None when there is none."""
        with self._lock:
            return next((lease.granted for lease in self._by_id.values()), None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._by_id)

    def _held(self, lease_id: bytes, digest: bytes) -> Lease | None:
        """The lease that the receiver means, unless it is over."""
        lease = self._by_id.get(lease_id)
        if lease is None or not lease.digest or not secrets.compare_digest(lease.digest, digest):
            return None
        if self._clock() >= lease.deadline:
            self._expire(lease)
            return None
        return lease

    def _expire(self, lease: Lease) -> None:
        self.expired_total += 1
        self._end_early(lease)

    def _end_early(self, lease: Lease) -> None:
        self._ended_early.append(lease.id)
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        del self._by_id[lease.id]
        del self._by_request[lease.request_id]
        self._ended.append(lease)


class ControlServer:
    """The sender's end: answers one message after the other; each peer has a thread of its own."""

    def __init__(
        self,
        authentication: PeerAuthentication,
        leases: LeaseTable,
        on_lease_ended: Callable[[], None],
        limits: Limits | None = None,
    ) -> None:
        """Raises ConfigError as PeerListener does."""
        self._leases = leases
        self._on_lease_ended = on_lease_ended
        self._limits = limits or Limits()
        self._metadata = b""
        self._handlers: MessageHandlers = {}
        self._listener = PeerListener(authentication, self._converse, "kv-control", self._limits)
        self.endpoint = self._listener.endpoint

    def start(self, metadata: PeerMetadata, handlers: MessageHandlers | None = None) -> None:
        """`handlers` answer the messages that are not about leases."""
        self._metadata = _encoder.encode(metadata)
        self._handlers = handlers or {}
        self._listener.start()

    @property
    def num_connections(self) -> int:
        return self._listener.num_connections

    def close(self) -> None:
        """No peer is answered any more, connected or not."""
        self._listener.close()

    def _converse(self, connection: socket.socket, peer: str) -> None:
        while (message := receive_message(connection, self._limits, AT_ONCE)) is not None:
            request = _decoded(message)
            try:
                connection.sendall(framed(self._answer(request, peer)))
            finally:
                # The receiver waits for the answer, the engine for free blocks; the answer goes first.
                if isinstance(request, Finish | Release):
                    self._on_lease_ended()

    def _answer(self, request: Request, peer: str) -> bytes:
        match request:
            case GetMetadata():
                return self._metadata
            case Begin(lease, digest):
                return Reply.HELD if self._leases.begin(lease, digest) else self._why_not(lease)
            case Finish(lease, digest):
                return Reply.HELD if self._leases.finish(lease, digest) else self._why_not(lease)
            case Release(lease):
                self._leases.release(lease)
                return Reply.OK
            case _:
                handler = self._handlers.get(type(request))
                return Reply.BAD if handler is None else handler(request, peer)

    def _why_not(self, lease: bytes) -> bytes:
        return Reply.LATE if self._leases.has_ended_early(lease) else Reply.GONE


def _decoded(message: bytes) -> Request:
    try:
        request: Request = _requests.decode(message)
        return request
    except UNREADABLE as error:
        raise UnreadableError(f"unreadable message of {len(message)} bytes: {error}") from error


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    used: float


class ControlClient:
    """The receiver's end: one question, one answer, a deadline; one connection per endpoint, opened again
    after any failure.
    """

    def __init__(
        self, authentication: PeerAuthentication, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._authentication = authentication
        # Each peer has a thread, and each of them changes these.
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}

    def metadata(self, endpoint: str, timeout: float) -> PeerMetadata:
        answer = self._ask(endpoint, GetMetadata(), timeout)
        try:
            return _peer_metadata.decode(answer)
        except UNREADABLE as error:
            raise KvTransferError(f"{endpoint} answered with unreadable metadata: {error}") from error

    def begin(self, handle: KvHandle, timeout: float) -> bool:
        """True when the lease holds and was extended for the read. Raises as `finish` does."""
        return self._holds(handle, Begin(handle.lease, handle.digest()), timeout)

    def finish(self, handle: KvHandle, timeout: float) -> bool:
        """True when the lease held from before the read until now. The sender frees its blocks.

        False for a handle that is not the lease's. Raises KvTransferError when the lease ended too early.
        """
        return self._holds(handle, Finish(handle.lease, handle.digest()), timeout)

    def release(self, handle: KvHandle, timeout: float) -> None:
        self._ask(handle.endpoint, Release(handle.lease), timeout)

    def send(self, endpoint: str, message: FromDecode | FromPrefill, timeout: float) -> bytes:
        return self._ask(endpoint, message, timeout)

    def drop(self, endpoint: str) -> None:
        with self._lock:
            connection = self._connections.pop(endpoint, None)
        if connection is not None:
            connection.socket.close()

    def close(self) -> None:
        for endpoint in list(self._connections):
            self.drop(endpoint)

    def _holds(self, handle: KvHandle, question: Begin | Finish, timeout: float) -> bool:
        answer = self._ask(handle.endpoint, question, timeout)
        if answer == Reply.LATE:
            raise KvTransferError(f"the lease of {handle.sender} ended before the KV was read")
        return answer == Reply.HELD

    def _ask(self, endpoint: str, question: msgspec.Struct, timeout: float) -> bytes:
        """Raises KvTransferError when no answer comes, PeerGoneError when nothing listens there any more."""
        seconds = max(timeout, 0.001)
        try:
            connection = self._connection(endpoint, timeout)
            connection.settimeout(seconds)
            connection.sendall(framed(_encoder.encode(question)))
            return receive_whole_frame(connection, seconds=seconds, max_bytes=MAX_MESSAGE_BYTES)
        except KvTransferError:
            self.drop(endpoint)
            raise
        # ValueError, OverflowError: the address parser raises them for an impossible host or port.
        except (OSError, EOFError, ValueError, OverflowError) as error:
            self.drop(endpoint)
            reason = f"no answer within {timeout:.1f} s" if isinstance(error, TimeoutError) else error
            kind = PeerGoneError if isinstance(error, ConnectionRefusedError) else KvTransferError
            raise kind(f"the peer's control channel {endpoint}: {reason}") from error

    def _connection(self, endpoint: str, timeout: float) -> socket.socket:
        now = self._clock()
        with self._lock:
            known = self._connections.get(endpoint)
            if known is not None and now - known.used <= _STALE_SECONDS:
                known.used = now
                return known.socket
            # Those of peers that have ended, too.
            old = [place for place, each in self._connections.items() if now - each.used > _STALE_SECONDS]
            stale = [self._connections.pop(place).socket for place in old]
        for each in stale:
            each.close()
        connection = self._authentication.connect(endpoint, timeout)
        with self._lock:
            self._connections[endpoint] = _Connection(connection, now)
        return connection
