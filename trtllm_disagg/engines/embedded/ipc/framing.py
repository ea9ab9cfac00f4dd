"""Length-prefixed messages on a stream socket."""

from __future__ import annotations

import socket
import struct
import time

#: As much as one system call receives of a message that is the last one.
AT_ONCE = 1 << 16
#: Bytes of the payload that follows.
LENGTH = struct.Struct("<I")


class UnreadableError(OSError):
    """The received bytes are no message; the connection is then closed."""


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def receive_frame(
    connection: socket.socket,
    *,
    seconds: float | None = None,
    max_bytes: int | None = None,
    begun: bytes = b"",
) -> bytes:
    """Receives one payload; `begun` is the part of its frame that was received before.

    Waits for `seconds` in all, or as the socket's timeout says. Raises TimeoutError, EOFError if the peer has closed
    the connection, and UnreadableError for more than `max_bytes` or for a `begun` that is longer than the frame.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    if len(begun) < LENGTH.size:
        begun = receive_exactly(connection, LENGTH.size, deadline, begun)
    (length,) = LENGTH.unpack_from(begun)
    if max_bytes is not None and length > max_bytes:
        raise UnreadableError(f"message of {length} bytes; at most {max_bytes} are accepted")
    size = LENGTH.size + length
    if len(begun) > size:
        raise UnreadableError(f"{len(begun) - size} bytes behind a message that is the last one")
    return receive_exactly(connection, size, deadline, begun)[LENGTH.size :]


def receive_whole_frame(connection: socket.socket, *, seconds: float, max_bytes: int) -> bytes:
    """As `receive_frame`, where nothing may follow the frame: for a short one this is one system call."""
    deadline = time.monotonic() + seconds
    connection.settimeout(seconds)
    begun = connection.recv(AT_ONCE)
    if not begun:
        raise EOFError("connection closed by the peer")
    return receive_frame(connection, seconds=deadline - time.monotonic(), max_bytes=max_bytes, begun=begun)


def seconds_left(deadline: float) -> float:
    """Seconds until `deadline` on the clock of time.monotonic(). Raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def receive_exactly(
    connection: socket.socket, size: int, deadline: float | None = None, begun: bytes = b""
) -> bytes:
    """`deadline`: on the clock of time.monotonic()."""
    parts = bytearray(begun)
    while len(parts) < size:
        if deadline is not None:
            connection.settimeout(seconds_left(deadline))
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("connection closed by the peer")
        parts += part
    return bytes(parts)
