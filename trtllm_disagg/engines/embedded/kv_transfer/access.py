"""Which peers an engine connects to, and how the two ends of a connection authenticate each other.

On one host: a Unix socket, and the kernel's statement that the other end runs as the same user. Between hosts: TLS with
one shared key (`shared_key.py`).
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trtllm_disagg.engines.embedded.kv_transfer.shared_key import KEY, SharedKeyAuthentication, read_key
from trtllm_disagg.errors import ConfigError, KvTransferError
from trtllm_disagg.processes import same_user
from trtllm_disagg.wire.kv_handle import UNIX, join_endpoint, scheme_of, split_endpoint

KEY_FILE_VARIABLE = "TRTLLM_DISAGG_TRANSFER_KEY_FILE"


class PeerGoneError(KvTransferError):
    """Nothing listens at the endpoint any more: the peer's process has ended."""


class PeerAuthentication(Protocol):
    """Both ends of the connections between engines. A connection that is not a peer's is refused with an OSError."""

    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket and its endpoint. Raises ConfigError."""
        ...

    def screen(self, connection: socket.socket) -> tuple[socket.socket, str]:
        """For an accepted connection, without waiting: the socket to use, and the peer's name in limits and logs, which
        is the same for all of its connections where that can be known.
        """
        ...

    def greet(self, connection: socket.socket) -> None:
        """Finish the authentication, within the connection's timeout."""
        ...

    def connect(self, endpoint: str, timeout: float) -> socket.socket:
        """Raises PeerGoneError when no peer listens there any more."""
        ...


class SameUserAuthentication:
    """Processes of this user on this host."""

    def listen(self) -> tuple[socket.socket, str]:
        name = f"@trtllm-disagg-kv-{secrets.token_hex(16)}"
        return same_user.listen(_socket_name(name, 1)), join_endpoint(name, 1)

    def screen(self, connection: socket.socket) -> tuple[socket.socket, str]:
        return connection, f"pid {same_user.require_same_user(connection).pid}"

    def greet(self, connection: socket.socket) -> None:
        """Nothing to do: `screen` has authenticated the peer."""

    def connect(self, endpoint: str, timeout: float) -> socket.socket:
        place = split_endpoint(endpoint)
        if place is None or scheme_of(endpoint) != UNIX:
            raise KvTransferError(
                f"the peer's control channel {endpoint} is on another host, and this engine talks to this host only: "
                "set embedded.transfer_host and embedded.transfer_key_file on both"
            )
        try:
            return same_user.connect(_socket_name(*place), max(timeout, 0.001))
        except PermissionError as error:
            # The kernel frees a name with its process: the peer has ended, and another user's process has the name now.
            raise PeerGoneError(f"the peer's control channel {endpoint}: {error}") from error


def _socket_name(name: str, number: int) -> str:
    return f"{name.removeprefix('@')}:{number}"


@dataclass(frozen=True, slots=True)
class OneHost:
    """KV moves on this host only, and nothing listens on a network."""

    def authentication(self) -> PeerAuthentication:
        return SameUserAuthentication()


@dataclass(frozen=True, slots=True)
class Network:
    #: Address of this machine; the engine listens only there.
    host: str
    key: bytes = field(repr=False)

    def authentication(self) -> PeerAuthentication:
        return SharedKeyAuthentication(self.host, self.key)


TransferScope = OneHost | Network


def choose_scope(host: str, key_file: Path | None) -> TransferScope:
    """`host` is a loopback address for one host. Raises ConfigError for another address without a usable key."""
    if _is_loopback(host):
        return OneHost()
    named = key_file or os.environ.get(KEY_FILE_VARIABLE)
    if not named:
        raise ConfigError.bad_value(
            "embedded.transfer_host",
            host,
            f"a loopback address, or together with {KEY} (or {KEY_FILE_VARIABLE}): other hosts get KV only when they "
            "have the same key",
        )
    return Network(host, read_key(Path(named)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
