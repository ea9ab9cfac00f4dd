"""The control channel between engines of one user on one host: it carries metadata, leases and offers.

CONTEXT_FIRST, under prefill's lease: begin, read, finish. `Begin` refuses a late read, and extends the lease for the
read. `Finish` is answered HELD if the blocks were untouched meanwhile: then the bytes are exactly the leased prompt's
KV. After any other answer the receiver discards them, so a forged, stale or foreign handle never puts another prompt's
KV into an answer.

GENERATION_FIRST: decode allocates blocks and offers them; prefill writes into them and sends a notice. Decoding
validates and bounds every message, as it comes from the network.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any

import msgspec

from trtllm_disagg.common.machine import require_same_user
from trtllm_disagg.common.reports import RateLimitedLog
from trtllm_disagg.engines.embedded.ipc import sockets
from trtllm_disagg.engines.embedded.ipc.sockets import (
    AT_ONCE,
    Listener,
    UnreadableError,
    framed,
    receive_frame,
    receive_only_frame,
)
from trtllm_disagg.engines.embedded.kv_transfer.base import PeerMetadata
from trtllm_disagg.engines.embedded.kv_transfer.transports import NOT_BETWEEN_HOSTS
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.types import BlockId, Number63, TokenId
from trtllm_disagg.wire.kv_handle import MAX_BLOCKS, UNREADABLE, Digest, KvHandle, socket_path

log = logging.getLogger(__name__)

#: An offer ends after at most this time.
MAX_OFFER_SECONDS = 3600.0
#: (token id, logprob, rank), the chosen token first.
_Logprobs = Annotated[list[tuple[int, float, int]], msgspec.Meta(max_length=1 << 16)]


class Reply(bytes, Enum):
    """The one-word answers. Only GetMetadata and Watch get data instead."""

    OK = b"ok"
    #: The lease, or the offer, still holds.
    HELD = b"held"
    GONE = b"gone"
    #: The lease has expired or was released.
    LATE = b"late"
    #: The engine has no handler for this message.
    BAD = b"bad"
    UNFIT = b"unfit"
    WITHDRAWN = b"withdrawn"
    #: To an offer: its disagg_request_id is in use. To a notice or a failure: decode has accepted it.
    CLAIMED = b"taken"
    FULL = b"full"
    #: Prefill has abandoned the request.
    ABANDONED = b"left"
    STOPPED = b"stopped"
    BUSY = b"busy"


class GetMetadata(msgspec.Struct, tag="card"):
    """Decode or prefill asks for the peer's PeerMetadata."""


class Begin(msgspec.Struct, tag="begin"):
    """Decode to prefill: I am about to read. Answered HELD if I may; LATE if the lease has expired; else GONE."""

    lease: bytes
    digest: bytes


class Finish(msgspec.Struct, tag="finish"):
    """Decode to prefill: I have read. Answered like Begin; prefill may reuse the blocks."""

    lease: bytes
    digest: bytes


class Release(msgspec.Struct, tag="release"):
    """Decode to prefill: I shall not read."""

    lease: bytes


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="offer"):
    """Decode to prefill: write the prompt's KV into these blocks (ids; my metadata has the other fields)."""

    #: `disagg_request_id`, the same in both requests.
    request: Number63
    #: A secret: only an engine with the offer can answer it.
    ticket: Digest
    #: Decode's control channel.
    endpoint: Annotated[str, msgspec.Meta(max_length=256)]
    layout: Digest
    prompt: Digest
    #: The prompt's blocks, in order. The first `num_known` hold their KV already.
    blocks: Annotated[list[BlockId], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS)]
    num_known: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    #: Seconds that decode waits for the notice, and prefill for the request.
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_OFFER_SECONDS)]


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Decode to prefill: I have given up. Answered BUSY until no write is possible any more, then STOPPED."""

    request: Number63
    ticket: Digest


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Decode to prefill: do you still work on these? Answered with the other tickets."""

    tickets: Annotated[list[Digest], msgspec.Meta(max_length=1 << 14)]


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Prefill to decode: your blocks have all KV; this is the first token."""

    ticket: Digest
    token: TokenId
    logprobs: _Logprobs | None
    #: The seed of this token's draw, for the remaining answer.
    seed: Number63
    #: Prompt tokens that prefill found in a cache.
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    bytes_moved: Annotated[int, msgspec.Meta(ge=0)]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Prefill to decode: there will be no notice."""

    ticket: Digest
    reason: Annotated[str, msgspec.Meta(max_length=4096)]
    #: Nothing can be written into the blocks any more.
    stopped: bool


class StillOffered(msgspec.Struct, frozen=True, tag="still-offered"):
    """Prefill to decode: were your known blocks unchanged while I read them? Answered HELD or GONE."""

    ticket: Digest


FromDecode = Offer | Withdraw | Watch
FromPrefill = Notice | Failure | StillOffered
Request = GetMetadata | Begin | Finish | Release | FromDecode | FromPrefill


def new_ticket() -> bytes:
    return secrets.token_bytes(16)


MAX_MESSAGE_BYTES = 1 << 20
#: A peer needs one.
MAX_CONNECTIONS = 512
_ACCEPT_RETRY_SECONDS = 0.1
#: The handler of each message type.
MessageHandlers = Mapping[type, Callable[[Any], bytes]]
_requests = msgspec.msgpack.Decoder(Request)
_peer_metadata = msgspec.msgpack.Decoder(PeerMetadata)
_encoder = msgspec.msgpack.Encoder()


class PeerGoneError(KvTransferError):
    """The endpoint is closed: the peer's process has ended."""


class ControlServer:
    """The sender's end: answers messages in order, on a thread per peer, so that no engine step delays them."""

    def __init__(self, on_lease_ended: Callable[[], None]) -> None:
        """Raises ConfigError as `Listener` does."""
        self._on_lease_ended = on_lease_ended
        self._metadata = b""
        self._handlers: MessageHandlers = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._warn = RateLimitedLog(log)
        self._listener = Listener("kv")
        self.endpoint = f"unix://{self._listener.path}"
        self._thread = threading.Thread(target=self._accept, name="kv-control", daemon=True)

    def start(self, metadata: PeerMetadata, handlers: MessageHandlers) -> None:
        """`handlers` answer all messages except GetMetadata."""
        self._metadata = _encoder.encode(metadata)
        self._handlers = handlers
        self._thread.start()

    def close(self) -> None:
        """Answer no peer any more."""
        self._closed = True
        # Unlike close(), this wakes the thread that waits in accept().
        _hang_up(self._listener)
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._listener.close()
        with self._lock:
            open_now = list(self._connections)
        for connection in open_now:
            _hang_up(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    self._warn("kv-control: cannot accept: %s", error)
                    time.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            try:
                peer = f"pid {require_same_user(connection).pid}"
                self._admit(connection)
                # Without a free thread: the peer may connect again.
                threading.Thread(
                    target=self._serve, args=(connection, peer), name="kv-control-peer", daemon=True
                ).start()
            except (OSError, RuntimeError) as error:
                self._warn("kv-control: refused a connection: %s", error)
                self._drop(connection)

    def _admit(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed or len(self._connections) >= MAX_CONNECTIONS:
                raise ConnectionError(f"{len(self._connections)} connections are open")
            self._connections.add(connection)

    def _drop(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._connections.discard(connection)

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            while begun := connection.recv(AT_ONCE):
                request = _decoded(receive_frame(connection, max_bytes=MAX_MESSAGE_BYTES, begun=begun))
                try:
                    connection.sendall(framed(self._answer(request)))
                finally:
                    # Answer the receiver first, then free the blocks.
                    if isinstance(request, Finish | Release):
                        self._on_lease_ended()
        except UnreadableError as error:
            self._warn("kv-control: hung up on %s: %s", peer, error)
        except (OSError, EOFError) as error:
            log.debug("kv-control: %s: %s", peer, error)
        finally:
            self._drop(connection)

    def _answer(self, request: Request) -> bytes:
        if isinstance(request, GetMetadata):
            return self._metadata
        handler = self._handlers.get(type(request))
        return Reply.BAD if handler is None else handler(request)


def _hang_up(connection: socket.socket) -> None:
    """Wake the thread that waits on this connection; it then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _decoded(message: bytes) -> Request:
    try:
        request: Request = _requests.decode(message)
        return request
    except UNREADABLE as error:
        raise UnreadableError(f"unreadable message of {len(message)} bytes: {error}") from error


class ControlClient:
    """The receiver's end: one question, one answer, a deadline. Reopens an endpoint's connection after a failure."""

    def __init__(self) -> None:
        # Changed by each peer's thread.
        self._lock = threading.Lock()
        self._connections: dict[str, socket.socket] = {}

    def metadata(self, endpoint: str, timeout: float) -> PeerMetadata:
        answer = self.ask(endpoint, GetMetadata(), timeout)
        try:
            return _peer_metadata.decode(answer)
        except UNREADABLE as error:
            raise KvTransferError(f"{endpoint} answered with unreadable metadata: {error}") from error

    def begin(self, handle: KvHandle, timeout: float) -> bool:
        """True if the lease holds; extends it for the read. Raises as `finish` does."""
        return self._holds(handle, Begin(handle.lease, handle.digest()), timeout)

    def finish(self, handle: KvHandle, timeout: float) -> bool:
        """True if the lease held during the whole read; the sender then frees its blocks.

        False for another lease's handle. Raises KvTransferError if the lease ended too early.
        """
        return self._holds(handle, Finish(handle.lease, handle.digest()), timeout)

    def release(self, handle: KvHandle, timeout: float) -> None:
        self.ask(handle.endpoint, Release(handle.lease), timeout)

    def drop(self, endpoint: str) -> None:
        with self._lock:
            connection = self._connections.pop(endpoint, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for endpoint in list(self._connections):
            self.drop(endpoint)

    def _holds(self, handle: KvHandle, question: Begin | Finish, timeout: float) -> bool:
        answer = self.ask(handle.endpoint, question, timeout)
        if answer == Reply.LATE:
            raise KvTransferError(f"the lease of {handle.sender} ended before the KV was read")
        return answer == Reply.HELD

    def ask(self, endpoint: str, question: msgspec.Struct, timeout: float) -> bytes:
        """Raises KvTransferError if no answer comes, PeerGoneError if the endpoint is closed."""
        seconds = max(timeout, 0.001)
        try:
            connection = self._connection(endpoint, timeout)
            connection.settimeout(seconds)
            connection.sendall(framed(_encoder.encode(question)))
            return receive_only_frame(connection, seconds=seconds, max_bytes=MAX_MESSAGE_BYTES)
        except (OSError, EOFError) as error:
            self.drop(endpoint)
            reason = f"no answer within {timeout:.1f} s" if isinstance(error, TimeoutError) else error
            raise KvTransferError(f"the peer's control channel {endpoint}: {reason}") from error

    def _connection(self, endpoint: str, timeout: float) -> socket.socket:
        with self._lock:
            known = self._connections.get(endpoint)
            ended = [] if known else [place for place, each in self._connections.items() if _is_hung_up(each)]
        for place in ended:
            self.drop(place)
        connection = known or _connect(endpoint, max(timeout, 0.001))
        with self._lock:
            self._connections[endpoint] = connection
        return connection


def _is_hung_up(connection: socket.socket) -> bool:
    """True if the peer has ended."""
    looks = select.poll()
    looks.register(connection, select.POLLRDHUP)
    return bool(looks.poll(0))


def _connect(endpoint: str, timeout: float) -> socket.socket:
    """Connects only to sockets of this user's engines: the endpoint may be forged."""
    path = socket_path(endpoint)
    if path is None or not sockets.is_socket_file(path):
        raise KvTransferError(
            f"the peer's control channel {endpoint} is not in {sockets.directory()} ({sockets.VARIABLE}), "
            f"which workers must share to exchange KV; {NOT_BETWEEN_HOSTS}"
        )
    try:
        return sockets.connect(path, timeout)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        # A file deleted by hand does not prove that its engine has stopped writing.
        if isinstance(error, FileNotFoundError) and not sockets.has_ended(path):
            raise
        raise PeerGoneError(f"the peer's control channel {endpoint}: {error}") from error
