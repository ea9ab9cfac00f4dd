"""Unix sockets between processes of one user on this host.

Their names are abstract: in the kernel only, which removes them with their process, however that ends. Every user of
the host can see them, so both ends check the user of the other, as the kernel recorded it when they were connected.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import NamedTuple

#: Linux: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")
#: Linux: seconds, microseconds.
_TIMEVAL = struct.Struct("ll")


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


def listen(name: str) -> socket.socket:
    """The user of each accepted connection is still to be checked (`require_same_user`)."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(128)
    return listener


def connect(name: str, timeout: float | None = None) -> socket.socket:
    """Raises PermissionError when another user's process listens there, and TimeoutError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end = None if timeout is None else time.monotonic() + timeout
        # A signal ends the system call early, and Python takes that for success.
        while not _is_connected(connection):
            # The socket's own limit: with Python's, a full backlog, which any user can cause, is an error at once.
            _limit_sends(connection, 0.0 if end is None else max(end - time.monotonic(), 1e-6))
            try:
                connection.connect(f"\0{name}")
            except BlockingIOError:
                raise TimeoutError(f"not accepted for {timeout} s") from None
        _limit_sends(connection, 0.0)
        connection.settimeout(timeout)
        require_same_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _limit_sends(connection: socket.socket, seconds: float) -> None:
    """Connecting counts as sending. 0: no limit."""
    whole, fraction = divmod(round(seconds * 1e6), 1_000_000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(whole, fraction))
