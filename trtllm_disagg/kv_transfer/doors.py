"""Which peers an engine talks to, and how the two ends of a connection make sure of each other.

On one host: a Unix socket, and the kernel's word that the other end runs as the same user. Between hosts: TLS with
one shared key (`tls_door.py`).
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import Protocol

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.endpoint import UNIX, join_endpoint, scheme_of, split_endpoint

_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class PeerGoneError(KvTransferError):
    """Nothing listens at the endpoint any more: the process that did has ended."""


class Door(Protocol):
    """Both ends of the connections between engines. What is not a peer is refused with an OSError."""

    scheme: str

    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket and its endpoint. Raises ConfigError."""
        ...

    def screen(self, connection: socket.socket) -> tuple[socket.socket, str]:
        """Of a connection that was just accepted, at once: what to talk through, and the peer's name in limits and
        logs, the same for all of its connections where that can be known.
        """
        ...

    def greet(self, connection: socket.socket) -> None:
        """The rest of the way in; it may take as long as the connection's timeout."""
        ...

    def connect(self, endpoint: str, timeout: float) -> socket.socket:
        """Raises PeerGoneError when no peer listens there any more."""
        ...


class LocalDoor:
    """Processes of this user on this host. The socket is an abstract one: the kernel removes it with its process."""

    scheme = UNIX

    def listen(self) -> tuple[socket.socket, str]:
        name = f"@trtllm-disagg-kv-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_address(name, 1))
        listener.listen(_BACKLOG)
        return listener, join_endpoint(name, 1)

    def screen(self, connection: socket.socket) -> tuple[socket.socket, str]:
        return connection, f"pid {_same_user(connection)}"

    def greet(self, connection: socket.socket) -> None:
        """The kernel has said it all."""

    def connect(self, endpoint: str, timeout: float) -> socket.socket:
        place = split_endpoint(endpoint)
        if place is None or scheme_of(endpoint) != UNIX:
            raise KvTransferError(
                f"the peer's control channel {endpoint} is on another host, and this engine talks to this host only: "
                "set embedded.transfer_host and embedded.transfer_key_file on both"
            )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(timeout, 0.001))
            connection.connect(_address(*place))
            _same_user(connection)
        except PermissionError as error:
            # Names are freed with their process, so the peer has ended, and another user has taken its name since.
            connection.close()
            raise PeerGoneError(f"the peer's control channel {endpoint}: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection


def _address(name: str, number: int) -> bytes:
    return f"\0{name.removeprefix('@')}:{number}".encode()


def _same_user(connection: socket.socket) -> int:
    """The pid at the other end. Raises PermissionError for another user's process."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise PermissionError(f"the process at the other end runs as uid {uid}, this one as {os.geteuid()}")
    return int(pid)
