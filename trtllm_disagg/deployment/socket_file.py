"""A Unix socket in a directory, however long the path of that is."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ORDERS_SOCKET = "orders.sock"
#: Linux: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """The same file; a socket's address has room for 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path) -> socket.socket:
    """For this user only, from its first moment on. One that a dead process left behind is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)
        path.unlink(missing_ok=True)
        with short_path(path) as name:
            listener.bind(name)
        listener.listen()
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel saw it when that connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return int(uid)


def connect(path: Path) -> socket.socket:
    """Raises OSError when no process listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as name:
            connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection
