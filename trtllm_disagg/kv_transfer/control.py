"""The sender's control channel: hands out its card, and confirms that a lease held while its blocks were read.

Read first, confirm after: the answer "held" means that nobody touched the blocks meanwhile, so what was read is
exactly the leased prompt's KV. Any other answer, and the receiver throws it away. A forged, stale or foreign
handle can therefore cost a read, but never put another prompt's KV into an answer.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from trtllm_disagg.errors import ConfigError, KvTransferError
from trtllm_disagg.kv_transfer.base import PeerCard
from trtllm_disagg.kv_transfer.handle import UNREADABLE, KvHandle
from trtllm_disagg.kv_transfer.lease import LeaseTable

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20
_ACCEPT_RETRY_SECONDS = 0.1
_LENGTH = struct.Struct("<I")


class GetCard(msgspec.Struct, tag="card"):
    pass


class Finish(msgspec.Struct, tag="finish"):
    lease: bytes
    digest: bytes


class Release(msgspec.Struct, tag="release"):
    lease: bytes


_requests = msgspec.msgpack.Decoder(GetCard | Finish | Release)
_cards = msgspec.msgpack.Decoder(PeerCard)
_encoder = msgspec.msgpack.Encoder()


class ControlServer:
    """Answers receivers on threads of its own, so that a long engine step delays no one."""

    def __init__(self, host: str, leases: LeaseTable, on_lease_ended: Callable[[], None]) -> None:
        self._leases = leases
        self._on_lease_ended = on_lease_ended
        self._card = b""
        self._listener = _listen(host)
        self._connections: set[socket.socket] = set()
        self._closed = False
        shown = f"[{host}]" if ":" in host else host
        self.endpoint = f"tcp://{shown}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="kv-control", daemon=True)

    def start(self, card: PeerCard) -> None:
        self._card = _encoder.encode(card)
        self._thread.start()

    def close(self) -> None:
        """Nobody is answered any more, whoever is connected."""
        self._closed = True
        # Unlike close(), this wakes the thread that waits in accept().
        _hang_up(self._listener)
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._listener.close()
        for connection in list(self._connections):
            _hang_up(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("control channel: cannot accept: %s", error)
                    time.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            self._connections.add(connection)
            threading.Thread(
                target=self._converse, args=(connection,), name="kv-control-peer", daemon=True
            ).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._closed:
                _send_frame(connection, self._answer(_receive_frame(connection)))
        self._connections.discard(connection)

    def _answer(self, message: bytes) -> bytes:
        try:
            request = _requests.decode(message)
        except UNREADABLE as error:
            log.warning("control channel: unreadable message of %d bytes: %s", len(message), error)
            return b"bad"
        if isinstance(request, GetCard):
            return self._card
        if isinstance(request, Release):
            self._leases.release(request.lease)
            answer = b"ok"
        elif self._leases.finish(request.lease, request.digest):
            answer = b"held"
        else:
            answer = b"late" if self._leases.has_expired(request.lease) else b"gone"
        self._on_lease_ended()
        return answer


def _listen(host: str) -> socket.socket:
    key, expected = "embedded.transfer_host", "an address of this machine that decode workers can connect to"
    if host in ("0.0.0.0", "::"):
        raise ConfigError.bad_value(key, host, expected)
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError.bad_value(key, host, f"{expected} ({error})") from error


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class ControlClient:
    """One question, one answer, a deadline; one connection per sender, made again after any failure."""

    def __init__(self) -> None:
        self._connections: dict[str, socket.socket] = {}

    def card(self, handle: KvHandle, timeout: float) -> PeerCard:
        answer = self._ask(handle.endpoint, GetCard(), timeout)
        try:
            return _cards.decode(answer)
        except UNREADABLE as error:
            raise KvTransferError(f"{handle.endpoint} answered with an unreadable card: {error}") from error

    def confirm(self, handle: KvHandle, timeout: float) -> bool:
        """True when the lease held from before the read until now. The sender frees its blocks.

        False for a handle that is not the lease's. Raises KvTransferError when the lease ended too early.
        """
        answer = self._ask(handle.endpoint, Finish(handle.lease, handle.digest()), timeout)
        if answer == b"late":
            raise KvTransferError(f"the lease of {handle.sender} ended before the KV was read")
        return answer == b"held"

    def release(self, handle: KvHandle, timeout: float) -> None:
        self._ask(handle.endpoint, Release(handle.lease), timeout)

    def close(self) -> None:
        for endpoint in list(self._connections):
            self._drop(endpoint)

    def _ask(self, endpoint: str, question: msgspec.Struct, timeout: float) -> bytes:
        try:
            connection = self._connections.get(endpoint) or self._connect(endpoint, timeout)
            connection.settimeout(max(timeout, 0.001))
            _send_frame(connection, _encoder.encode(question))
            return _receive_frame(connection)
        # ValueError, OverflowError: what the address parser says of a host or port that cannot be.
        except (OSError, EOFError, ValueError, OverflowError) as error:
            self._drop(endpoint)
            reason = f"no answer within {timeout:.1f} s" if isinstance(error, TimeoutError) else error
            raise KvTransferError(f"the prefill worker's control channel {endpoint}: {reason}") from error

    def _connect(self, endpoint: str, timeout: float) -> socket.socket:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[endpoint] = connection
        return connection

    def _drop(self, endpoint: str) -> None:
        if connection := self._connections.pop(endpoint, None):
            connection.close()


def _send_frame(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive_frame(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise OSError(f"message of {length} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("connection closed by the peer")
        parts += part
    return bytes(parts)
