"""Sockets between processes of one user on one host that leave no file behind, however those processes end.

Their names are in the kernel only, where every user of the host can see them, so both sides look at the user of the
other.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


def listen() -> tuple[socket.socket, str]:
    """A socket for `accept`, and its address for `connect`."""
    address = f"trtllm-disagg-{os.getpid()}-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{address}")
    listener.listen()
    return listener, address


def accept(listener: socket.socket) -> socket.socket:
    """The next connection of a process of this user; others are closed. Raises TimeoutError as the listener does."""
    while True:
        connection, _ = listener.accept()
        if _user_of(connection) == os.getuid():
            return connection
        connection.close()


def connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{address}")
        if _user_of(connection) != os.getuid():
            raise PermissionError(f"the process that listens at {address} is another user's")
    except BaseException:
        connection.close()
        raise
    return connection


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
