"""Frames over TCP, one answer a question: the wire under the control channel."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

from trtllm_disagg.errors import ConfigError, KvTransferError

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20
_ACCEPT_RETRY_SECONDS = 0.1
_LENGTH = struct.Struct("<I")


class PeerGoneError(KvTransferError):
    """Nobody listens at the endpoint any more: the process that did has ended."""


class ChannelServer:
    """Answers on threads of its own, so that a long engine step delays no one."""

    def __init__(self, host: str, answer: Callable[[bytes], bytes]) -> None:
        """Raises ConfigError for a host that cannot be listened on, or not be connected to."""
        self._answer = answer
        self._listener = _listen(host)
        self._connections: set[socket.socket] = set()
        self._closed = False
        shown = f"[{host}]" if ":" in host else host
        self.endpoint = f"tcp://{shown}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="kv-control", daemon=True)

    def start(self) -> None:
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


class ChannelClient:
    """One question, one answer, a deadline; one connection per endpoint, made again after any failure."""

    def __init__(self) -> None:
        self._connections: dict[str, socket.socket] = {}

    def ask(self, endpoint: str, question: bytes, timeout: float) -> bytes:
        """Raises KvTransferError when no answer comes, PeerGoneError when nobody listens there any more."""
        try:
            connection = self._connections.get(endpoint) or self._connect(endpoint, timeout)
            connection.settimeout(max(timeout, 0.001))
            _send_frame(connection, question)
            return _receive_frame(connection)
        # ValueError, OverflowError: what the address parser says of a host or port that cannot be.
        except (OSError, EOFError, ValueError, OverflowError) as error:
            self.drop(endpoint)
            reason = f"no answer within {timeout:.1f} s" if isinstance(error, TimeoutError) else error
            kind = PeerGoneError if isinstance(error, ConnectionRefusedError) else KvTransferError
            raise kind(f"the peer's control channel {endpoint}: {reason}") from error

    def drop(self, endpoint: str) -> None:
        if connection := self._connections.pop(endpoint, None):
            connection.close()

    def close(self) -> None:
        for endpoint in list(self._connections):
            self.drop(endpoint)

    def _connect(self, endpoint: str, timeout: float) -> socket.socket:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[endpoint] = connection
        return connection


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
