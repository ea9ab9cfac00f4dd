"""Messages on a stream socket, each with its length in front; and the process at the other end of a Unix socket, as the
kernel saw it when the connection was made.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import NamedTuple

#: Linux: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")
#: Bytes of the payload that follows.
LENGTH = struct.Struct("<I")


class PeerProcess(NamedTuple):
    pid: int
    uid: int


def peer_process(connection: socket.socket) -> PeerProcess:
    pid, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return PeerProcess(pid, uid)


def require_same_user(connection: socket.socket) -> PeerProcess:
    """Raises PermissionError for another user's process."""
    peer = peer_process(connection)
    if peer.uid != os.geteuid():
        raise PermissionError(
            f"the process at the other end runs as uid {peer.uid}, this one as {os.geteuid()}"
        )
    return peer


class UnreadableError(OSError):
    """What came is no message: its sender is hung up on."""


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def receive_frame(
    connection: socket.socket,
    *,
    seconds: float | None = None,
    max_bytes: int | None = None,
    begun: bytes = b"",
) -> bytes:
    """One payload; `begun` has been received of its frame.

    Waits as long as the socket does, or `seconds` in all. Raises EOFError when the other end is gone, TimeoutError, and
    UnreadableError for more than `max_bytes`.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    (length,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size, deadline, begun))
    if max_bytes is not None and length > max_bytes:
        raise UnreadableError(f"message of {length} bytes; at most {max_bytes} are accepted")
    return receive_exactly(connection, length, deadline)


def receive_exactly(
    connection: socket.socket, size: int, deadline: float | None = None, begun: bytes = b""
) -> bytes:
    """`deadline`: of time.monotonic()."""
    parts = bytearray(begun)
    while len(parts) < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("connection closed by the peer")
        parts += part
    return bytes(parts)
