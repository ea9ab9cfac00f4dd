"""Which user is at the other end of a Unix socket, as the kernel recorded it when the two were connected."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

#: Linux: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


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
