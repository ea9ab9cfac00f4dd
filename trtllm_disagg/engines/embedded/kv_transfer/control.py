"""The control channel between engines of one user on one host: an engine sends its metadata, confirms that a lease
holds before and after a read, and gets decode's offers.

Begin, read, finish: `Begin` refuses a read that would come too late, and extends the lease for the read; `Finish` is
answered HELD when the blocks were untouched meanwhile, so that the bytes read are exactly the leased prompt's KV. After
any other answer the receiver discards them. A forged, stale or foreign handle reads nothing, and can never put another
prompt's KV into an answer.

That is CONTEXT_FIRST, under prefill's lease. GENERATION_FIRST: decode allocates its blocks and offers them; prefill
writes into them and sends a notice. All messages come from the network, so decoding validates and bounds them.
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

from trtllm_disagg.engines.embedded.ipc import sockets
from trtllm_disagg.engines.embedded.ipc.sockets import (
    AT_ONCE,
    Listener,
    UnreadableError,
    framed,
    receive_frame,
    receive_whole_frame,
)
from trtllm_disagg.engines.embedded.kv_transfer.base import PeerMetadata
from trtllm_disagg.engines.embedded.kv_transfer.transports import NOT_BETWEEN_HOSTS
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.processes.machine import require_same_user
from trtllm_disagg.processes.reports import RateLimitedLog
from trtllm_disagg.types import BlockId, Number63, TokenId
from trtllm_disagg.wire.kv_handle import MAX_BLOCKS, UNREADABLE, Digest, KvHandle, socket_path

log = logging.getLogger(__name__)

#: An offer is void after at most this time.
MAX_OFFER_SECONDS = 3600.0
#: (token id, logprob, rank), the chosen token first.
_Logprobs = Annotated[list[tuple[int, float, int]], msgspec.Meta(max_length=1 << 16)]


class Reply(bytes, Enum):
    """The one-word answers; only GetMetadata and Watch are answered with data."""

    OK = b"ok"
    #: The lease, or the offer, still holds.
    HELD = b"held"
    GONE = b"gone"
    #: The lease has expired, or was given back.
    LATE = b"late"
    #: The engine has no handler for this message.
    BAD = b"bad"
    UNFIT = b"unfit"
    WITHDRAWN = b"withdrawn"
    #: Of an offer: one with this disagg_request_id is there. Of a notice or a failure: decode has accepted it.
    TAKEN = b"taken"
    FULL = b"full"
    #: Prefill has abandoned the request.
    ABANDONED = b"left"
    STOPPED = b"stopped"
    BUSY = b"busy"


class GetMetadata(msgspec.Struct, tag="card"):
    """Decode or prefill asks for the other engine's PeerMetadata."""


class Begin(msgspec.Struct, tag="begin"):
    """Decode to prefill: I am about to read. Answered HELD when I may; LATE when the lease has expired; else GONE."""

    lease: bytes
    digest: bytes


class Finish(msgspec.Struct, tag="finish"):
    """Decode to prefill: I have read. Answered like Begin; the blocks are prefill's again."""

    lease: bytes
    digest: bytes


class Release(msgspec.Struct, tag="release"):
    """Decode to prefill: I shall not read."""

    lease: bytes


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="offer"):
    """Decode to prefill: write the prompt's KV into these blocks of mine. Only ids; the rest is in my metadata."""

    #: `disagg_request_id`, the same in both requests.
    request: Number63
    #: A secret: only an engine that has received the offer can answer for it.
    ticket: Digest
    #: Decode's control channel.
    endpoint: Annotated[str, msgspec.Meta(max_length=256)]
    layout: Digest
    prompt: Digest
    #: The prompt's blocks, in order. The first `num_known` hold their KV already.
    blocks: Annotated[list[BlockId], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS)]
    num_known: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    #: How long decode waits for the notice, and prefill for the request.
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_OFFER_SECONDS)]


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Decode to prefill: I have given up. Answered STOPPED once nothing can be written any more, and BUSY before."""

    request: Number63
    ticket: Digest


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Decode to prefill: do you still work on these? Answered with the tickets that prefill does not work on."""

    tickets: Annotated[list[Digest], msgspec.Meta(max_length=1 << 14)]


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Prefill to decode: all KV is in your blocks, and this is the first token."""

    ticket: Digest
    token: TokenId
    logprobs: _Logprobs | None
    #: The seed that the token was drawn with; the rest of the answer goes on with it.
    seed: Number63
    #: Prompt tokens that prefill did not have to compute.
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    bytes_moved: Annotated[int, msgspec.Meta(ge=0)]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Prefill to decode: there will be no notice."""

    ticket: Digest
    reason: Annotated[str, msgspec.Meta(max_length=4096)]
    #: Nothing can be written into the blocks any more.
    stopped: bool


class StillOffered(msgspec.Struct, frozen=True, tag="still-offered"):
    """Prefill to decode: were your known blocks, which I have read, unchanged until now? Answered HELD or GONE."""

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
    """Nothing listens at the endpoint any more: the peer's process has ended."""


class ControlServer:
    """The sender's end: answers one message after the other; each peer has a thread of its own, so that a long engine
    step delays none of them.
    """

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
        """`handlers` answer all messages but GetMetadata."""
        self._metadata = _encoder.encode(metadata)
        self._handlers = handlers
        self._thread.start()

    def close(self) -> None:
        """No peer is answered any more, connected or not."""
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
                # One for which the system has no thread may come again.
                threading.Thread(
                    target=self._serve, args=(connection, peer), name="kv-control-peer", daemon=True
                ).start()
            except (OSError, RuntimeError) as error:
                self._warn("kv-control: refused a connection: %s", error)
                self._drop(connection)

    def _admit(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed or len(self._connections) >= MAX_CONNECTIONS:
                raise ConnectionError(f"{len(self._connections)} are open")
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
                    # The receiver waits for the answer, the engine for free blocks; the answer goes first.
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
    """Wakes the thread that waits for this connection, which then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _decoded(message: bytes) -> Request:
    try:
        request: Request = _requests.decode(message)
        return request
    except UNREADABLE as error:
        raise UnreadableError(f"unreadable message of {len(message)} bytes: {error}") from error


class ControlClient:
    """The receiver's end: one question, one answer, a deadline; one connection per endpoint, opened again
    after any failure.
    """

    def __init__(self) -> None:
        # Each peer has a thread, and each of them changes these.
        self._lock = threading.Lock()
        self._connections: dict[str, socket.socket] = {}

    def metadata(self, endpoint: str, timeout: float) -> PeerMetadata:
        answer = self.ask(endpoint, GetMetadata(), timeout)
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
        """Raises KvTransferError when no answer comes, PeerGoneError when nothing listens there any more."""
        seconds = max(timeout, 0.001)
        try:
            connection = self._connection(endpoint, timeout)
            connection.settimeout(seconds)
            connection.sendall(framed(_encoder.encode(question)))
            return receive_whole_frame(connection, seconds=seconds, max_bytes=MAX_MESSAGE_BYTES)
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
    """The peer has ended."""
    looks = select.poll()
    looks.register(connection, select.POLLRDHUP)
    return bool(looks.poll(0))


def _connect(endpoint: str, timeout: float) -> socket.socket:
    """The endpoint may be forged: only a socket that an engine of this user has made is connected to."""
    path = socket_path(endpoint)
    if path is None or not sockets.is_socket_file(path):
        raise KvTransferError(
            f"the peer's control channel {endpoint} is not in {sockets.directory()} ({sockets.VARIABLE}), "
            f"which workers share that exchange KV; {NOT_BETWEEN_HOSTS}"
        )
    try:
        return sockets.connect(path, timeout)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        # A file that was deleted by hand does not show that its engine writes no more.
        if isinstance(error, FileNotFoundError) and not sockets.has_ended(path):
            raise
        raise PeerGoneError(f"the peer's control channel {endpoint}: {error}") from error
