"""Frames over a door, one answer a question: the wire under the control channel."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.doors import Door, PeerGoneError
from trtllm_disagg.kv_transfer.reception import Limits, Reception, UnreadableError

MAX_MESSAGE_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
#: A client does not trust a connection that it has not used for so long: the server hangs up at `Limits.idle`.
_STALE_SECONDS = 60.0


class ChannelServer:
    """Answers one message after the other, each peer's on a thread of its own."""

    def __init__(
        self, door: Door, answer: Callable[[bytes, str], bytes], limits: Limits | None = None
    ) -> None:
        """`answer` gets a message and the peer's name, and raises UnreadableError. Raises ConfigError as Reception."""
        self._answer = answer
        self._limits = limits or Limits()
        self._reception = Reception(door, self._converse, "kv-control", self._limits)
        self.endpoint = self._reception.endpoint

    @property
    def num_connections(self) -> int:
        return self._reception.num_connections

    def start(self) -> None:
        self._reception.start()

    def close(self) -> None:
        """No peer is answered any more, connected or not."""
        self._reception.close()

    def _converse(self, connection: socket.socket, peer: str) -> None:
        while (message := receive_message(connection, self._limits)) is not None:
            send_frame(connection, self._answer(message, peer))


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    used: float


class ChannelClient:
    """One question, one answer, a deadline; one connection per endpoint, made again after any failure."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._connections: dict[str, _Connection] = {}

    def ask(self, endpoint: str, question: bytes, timeout: float) -> bytes:
        """Raises KvTransferError when no answer comes, PeerGoneError when nothing listens there any more."""
        try:
            connection = self._connection(endpoint, timeout)
            connection.settimeout(max(timeout, 0.001))
            send_frame(connection, question)
            return receive_frame(connection, max(timeout, 0.001))
        except KvTransferError:
            self.drop(endpoint)
            raise
        # ValueError, OverflowError: what the address parser says of a host or port that cannot be.
        except (OSError, EOFError, ValueError, OverflowError) as error:
            self.drop(endpoint)
            reason = f"no answer within {timeout:.1f} s" if isinstance(error, TimeoutError) else error
            kind = PeerGoneError if isinstance(error, ConnectionRefusedError) else KvTransferError
            raise kind(f"the peer's control channel {endpoint}: {reason}") from error

    def drop(self, endpoint: str) -> None:
        if connection := self._connections.pop(endpoint, None):
            connection.socket.close()

    def close(self) -> None:
        for endpoint in list(self._connections):
            self.drop(endpoint)

    def _connection(self, endpoint: str, timeout: float) -> socket.socket:
        now = time.monotonic()
        known = self._connections.get(endpoint)
        if known is not None and now - known.used > _STALE_SECONDS:
            self.drop(endpoint)
            known = None
        if known is None:
            known = self._connections[endpoint] = _Connection(self._door.connect(endpoint, timeout), now)
        known.used = now
        return known.socket


def receive_message(connection: socket.socket, limits: Limits) -> bytes | None:
    """The next frame, within `idle` and `frame` seconds; None when the peer has hung up. The connection then gives an
    answer `frame` seconds to be taken.
    """
    connection.settimeout(limits.idle)
    first = connection.recv(1)
    message = receive_frame(connection, limits.frame, first) if first else None
    connection.settimeout(limits.frame)
    return message


def send_frame(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(connection: socket.socket, seconds: float, begun: bytes = b"") -> bytes:
    """One frame, of which `begun` has been received."""
    deadline = time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, deadline, begun))
    if length > MAX_MESSAGE_BYTES:
        raise UnreadableError(f"message of {length} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    return _receive_exactly(connection, length, deadline)


def _receive_exactly(connection: socket.socket, size: int, deadline: float, begun: bytes = b"") -> bytes:
    parts = bytearray(begun)
    while len(parts) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("connection closed by the peer")
        parts += part
    return bytes(parts)
