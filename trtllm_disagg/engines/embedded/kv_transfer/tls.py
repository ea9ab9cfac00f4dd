"""The transport between hosts: blocks over TLS, to and from peers that have the key.

UCX over tcp authenticates no peer, and is slower than a socket. A read has ended when it returns or raises, so no byte
lands late in the blocks that it fills. A write that timed out may: what was sent is on its way after its connection was
closed. The writer then asks the owner of the pool to stop it.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch

from trtllm_disagg.engines.embedded.kv_transfer.access import Network, TransferScope
from trtllm_disagg.engines.embedded.kv_transfer.base import PeerMetadata, ReadTimeoutError, runs_of
from trtllm_disagg.engines.embedded.kv_transfer.host import new_memory
from trtllm_disagg.engines.embedded.kv_transfer.listener import (
    MAX_MESSAGE_BYTES,
    Limits,
    PeerListener,
    hang_up,
    receive_message,
)
from trtllm_disagg.engines.embedded.kv_transfer.messages import new_ticket
from trtllm_disagg.errors import ConfigError, KvTransferError
from trtllm_disagg.processes.framing import UnreadableError, framed, receive_frame, seconds_left
from trtllm_disagg.wire.kv_handle import UNREADABLE, Digest

_LIMITS = Limits()
#: A peer that sends nothing for this long is considered dead.
_SILENCE_SECONDS = 30.0
#: The writer's timeout for the answer to a Stop, which it sends again; and how long the owner waits before it answers.
_STOP_SECONDS, _STOPPING_SECONDS = 5.0, 2.0
_REMEMBERED = 1024
_PIECE_BYTES = 1 << 20
_OK = b"ok"
_BUSY = b"the store has not stopped yet"
#: int32 block ids of one message.
_Ids = Annotated[bytes, msgspec.Meta(min_length=4, max_length=1 << 19)]


class Fetch(msgspec.Struct, tag="fetch"):
    """Answered "ok" and the blocks, one behind the other."""

    blocks: _Ids
    block_bytes: int


class Store(msgspec.Struct, tag="store"):
    """Followed by the blocks; answered "ok" when they are there."""

    #: A secret of the writer, by which it may stop the store.
    ticket: Digest
    blocks: _Ids
    block_bytes: int


class Stop(msgspec.Struct, tag="stop"):
    """The writer has given up on a store. Answered "ok" once nothing of it can land any more."""

    ticket: Digest


_requests = msgspec.msgpack.Decoder(Fetch | Store | Stop)


class _Running(NamedTuple):
    connection: socket.socket
    has_ended: threading.Event


class _Stores:
    """The stores that fill this pool's blocks now, and the last ones that were stopped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[bytes, _Running] = {}
        self._stopped: deque[bytes] = deque(maxlen=_REMEMBERED)

    @contextlib.contextmanager
    def running(self, ticket: bytes, connection: socket.socket) -> Iterator[str]:
        """Around the bytes of a store. Yields why it may not begin; empty when it may."""
        running = _Running(connection, threading.Event())
        with self._lock:
            reason = "the writer has given up on this store" if ticket in self._stopped else ""
            reason = "a store with this ticket runs already" if ticket in self._running else reason
            if not reason:
                self._running[ticket] = running
        try:
            yield reason
        finally:
            if not reason:
                with self._lock:
                    del self._running[ticket]
                running.has_ended.set()

    def stop(self, ticket: bytes, seconds: float) -> bool:
        """True once nothing of the store can land any more, whether it has come or not."""
        with self._lock:
            self._stopped.append(ticket)
            running = self._running.get(ticket)
        if running is None:
            return True
        hang_up(running.connection)
        return running.has_ended.wait(seconds)


class TlsTransport:
    name = "TLS"

    def __init__(self, scope: TransferScope, clock: Callable[[], float] = time.monotonic) -> None:
        if not isinstance(scope, Network):
            raise ConfigError.bad_value(
                "cache_transceiver_config.backend",
                self.name,
                "DEFAULT, NIXL or SHARED_MEMORY on one host; TLS is for an embedded.transfer_host that is not loopback",
            )
        self._authentication = scope.authentication()
        self._clock = clock
        self._blocks = np.empty((0, 0), np.uint8)
        self._listener: PeerListener | None = None
        self._stores = _Stores()
        self._lock = threading.Lock()
        #: Connections that nothing uses now, by endpoint.
        self._idle: dict[str, list[tuple[socket.socket, float]]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            raise ConfigError.bad_value(
                "cache_transceiver_config.backend", self.name, "NIXL on a CUDA device; TLS is for the CPU"
            )
        pool = new_memory(shape, dtype, device)
        self._blocks = pool.view(torch.uint8).numpy().reshape(shape[0], -1)
        return pool

    def serve(self, sender: str) -> bytes:
        self._listener = PeerListener(self._authentication, self._converse, "kv-data", _LIMITS)
        self._listener.start()
        return self._listener.endpoint.encode()

    def read(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        self._fetch(peer, remote_blocks, [self._blocks[run] for run in runs_of(local_blocks)], timeout)
        return len(local_blocks) * self._blocks.shape[1]

    def write(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        deadline = time.monotonic() + timeout
        ticket = new_ticket()
        with self._connection(peer, timeout, has_stopped=partial(self._stop, peer, ticket)) as connection:
            ids = remote_blocks.astype(np.int32).tobytes()
            _send_request(connection, Store(ticket, ids, self._blocks.shape[1]), deadline)
            for run in runs_of(local_blocks):
                _send(connection, self._blocks[run], deadline)
            _require_ok(peer, connection, deadline)
        return len(local_blocks) * self._blocks.shape[1]

    @contextlib.contextmanager
    def fetched(
        self, peer: PeerMetadata, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> Iterator[np.ndarray]:
        into = np.empty((len(blocks), block_bytes), np.uint8)
        self._fetch(peer, blocks, [into], timeout)
        yield into

    def forget(self, peer: PeerMetadata) -> None:
        with self._lock:
            idle = self._idle.pop(_endpoint_of(peer), [])
        for connection, _ in idle:
            connection.close()

    def progress(self) -> None:
        """Peers are served on threads of their own."""

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        with self._lock:
            idle = [connection for connections in self._idle.values() for connection, _ in connections]
            self._idle.clear()
        for connection in idle:
            connection.close()

    # -- the reader's and the writer's end

    def _fetch(self, peer: PeerMetadata, blocks: np.ndarray, into: list[np.ndarray], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._connection(peer, timeout) as connection:
            _send_request(connection, Fetch(blocks.astype(np.int32).tobytes(), into[0].shape[1]), deadline)
            _require_ok(peer, connection, deadline)
            for part in into:
                _receive(connection, part, deadline)

    def _stop(self, peer: PeerMetadata, ticket: bytes) -> bool:
        """Have the peer stop a store. True when nothing of it can land any more."""
        deadline = time.monotonic() + _STOP_SECONDS
        try:
            with self._connection(peer, _STOP_SECONDS) as connection:
                _send_request(connection, Stop(ticket), deadline)
                _require_ok(peer, connection, deadline)
        except (KvTransferError, ReadTimeoutError):
            return False
        return True

    @contextlib.contextmanager
    def _connection(
        self, peer: PeerMetadata, timeout: float, *, has_stopped: Callable[[], bool] | None = None
    ) -> Iterator[socket.socket]:
        """A connection for this caller alone; after a failure it is closed. `has_stopped`: of a write, whether it can
        land no more.
        """
        endpoint = _endpoint_of(peer)
        connection = None
        try:
            connection = self._take_idle(endpoint) or self._authentication.connect(endpoint, timeout)
            yield connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError):
                if has_stopped is None:
                    message = f"reading KV from {peer.sender} took longer than {timeout:.1f} s"
                    raise ReadTimeoutError(message, may_land_later=False) from error
                # Bytes that were sent may still be on their way into the peer's blocks.
                raise ReadTimeoutError(
                    f"writing KV to {peer.sender} took longer than {timeout:.1f} s",
                    may_land_later=connection is not None,
                    has_ended=has_stopped,
                ) from error
            if isinstance(error, OSError | EOFError | ValueError | OverflowError):
                raise KvTransferError(f"KV transfer with {peer.sender} failed: {error}") from error
            raise
        with self._lock:
            self._idle.setdefault(endpoint, []).append((connection, self._clock()))

    def _take_idle(self, endpoint: str) -> socket.socket | None:
        """The idle connection that was used last, unless the peer may have closed it by now. Then all such connections
        are closed, those of peers that have ended, too.
        """
        oldest = self._clock() - _LIMITS.idle / 2
        with self._lock:
            idle = self._idle.get(endpoint, [])
            if idle and idle[-1][1] >= oldest:
                return idle.pop()[0]
            every = [(place, *each) for place, connections in self._idle.items() for each in connections]
            self._idle = {}
            for place, connection, used in every:
                if used >= oldest:
                    self._idle.setdefault(place, []).append((connection, used))
        for _, connection, used in every:
            if used < oldest:
                connection.close()
        return None

    # -- the pool owner's end

    def _converse(self, connection: socket.socket, peer: str) -> None:
        while (message := receive_message(connection, _LIMITS)) is not None:
            try:
                request = _requests.decode(message)
            except UNREADABLE as error:
                raise UnreadableError(f"unreadable message of {len(message)} bytes: {error}") from error
            if isinstance(request, Stop):
                has_stopped = self._stores.stop(request.ticket, _STOPPING_SECONDS)
                connection.sendall(framed(_OK if has_stopped else _BUSY))
                continue
            _refuse_if(self._why_not(request), connection)
            runs = [self._blocks[run] for run in runs_of(np.frombuffer(request.blocks, np.int32))]
            if isinstance(request, Fetch):
                connection.sendall(framed(_OK))
                for run in runs:
                    connection.sendall(_bytes_of(run))
            else:
                self._store(request.ticket, runs, connection)

    def _store(self, ticket: bytes, runs: list[np.ndarray], connection: socket.socket) -> None:
        with self._stores.running(ticket, connection) as why_not:
            _refuse_if(why_not, connection)
            for run in runs:
                _receive(connection, run, math.inf)
        connection.sendall(framed(_OK))

    def _why_not(self, request: Fetch | Store) -> str:
        if request.block_bytes != self._blocks.shape[1]:
            return f"blocks of {request.block_bytes} bytes were asked for; these have {self._blocks.shape[1]}"
        if len(request.blocks) % 4:
            return "block ids are not whole"
        blocks = np.frombuffer(request.blocks, np.int32)
        if blocks.min() < 0 or blocks.max() >= len(self._blocks):
            return f"block ids are outside of [0, {len(self._blocks)})"
        return ""


def _endpoint_of(peer: PeerMetadata) -> str:
    return peer.address.decode(errors="replace")


def _refuse_if(reason: str, connection: socket.socket) -> None:
    if reason:
        connection.sendall(framed(reason.encode()))
        raise UnreadableError(reason)


def _send_request(connection: socket.socket, request: Fetch | Store | Stop, deadline: float) -> None:
    connection.settimeout(seconds_left(deadline))
    connection.sendall(framed(msgspec.msgpack.encode(request)))


def _require_ok(peer: PeerMetadata, connection: socket.socket, deadline: float) -> None:
    answer = receive_frame(connection, seconds=seconds_left(deadline), max_bytes=MAX_MESSAGE_BYTES)
    if answer != _OK:
        raise KvTransferError(f"{peer.sender} refused: {answer.decode(errors='replace')[:200]}")


def _bytes_of(blocks: np.ndarray) -> memoryview:
    return blocks.reshape(-1).data


def _send(connection: socket.socket, blocks: np.ndarray, deadline: float) -> None:
    view = _bytes_of(blocks)
    for start in range(0, len(view), _PIECE_BYTES):
        # TLS applies the timeout to each of its records, of 16 KiB.
        connection.settimeout(seconds_left(deadline))
        connection.sendall(view[start : start + _PIECE_BYTES])


def _receive(connection: socket.socket, blocks: np.ndarray, deadline: float) -> None:
    view = _bytes_of(blocks)
    for start in range(0, len(view), _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        connection.settimeout(min(seconds_left(deadline), _SILENCE_SECONDS))  # a system call: once per piece
        while piece:
            count = connection.recv_into(piece)
            if not count:
                raise EOFError("connection closed by the peer")
            piece = piece[count:]
            seconds_left(deadline)
