"""Takes connections in through a door, keeps their number within limits, and gives each a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_disagg.kv_transfer.doors import Door
from trtllm_disagg.kv_transfer.seldom import Seldom

log = logging.getLogger(__name__)

_ACCEPT_RETRY_SECONDS = 0.1


class UnreadableError(OSError):
    """What came is no message: its sender is hung up on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds, and numbers of connections. A peer needs one connection."""

    #: Of connections that have been greeted.
    connections: int = 512
    #: Of those that have not shown yet that they may come in. The oldest one makes room.
    newcomers: int = 64
    greeting: float = 5.0
    idle: float = 120.0
    #: From a frame's first byte to its last one; and for an answer to be taken.
    frame: float = 10.0


class Reception:
    """Peers are served on threads of its own, so that a long engine step delays none of them."""

    def __init__(
        self, door: Door, converse: Callable[[socket.socket, str], None], name: str, limits: Limits
    ) -> None:
        """`converse` gets a connection and the peer's name, and talks until it has ended, or raises OSError, EOFError
        or UnreadableError. Raises ConfigError for a host that cannot be listened on, or not be connected to.
        """
        self._door = door
        self._converse = converse
        self._name = name
        self._limits = limits
        self._lock = threading.Lock()
        #: Oldest first.
        self._newcomers: dict[socket.socket, None] = {}
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._warn = Seldom(log)
        self._listener, self.endpoint = door.listen()
        self._thread = threading.Thread(target=self._accept, name=self._name, daemon=True)

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._connections) + len(self._newcomers)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No peer is answered any more, connected or not."""
        self._closed = True
        # Unlike close(), this wakes the thread that waits in accept().
        _hang_up(self._listener)
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._listener.close()
        with self._lock:
            open_now = [*self._connections, *self._newcomers]
        for connection in open_now:
            _hang_up(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    self._warn("%s: cannot accept: %s", self._name, error)
                    time.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            try:
                newcomer, peer = self._door.screen(connection)
            except OSError as error:
                self._warn("%s: refused a connection: %s", self._name, error)
                connection.close()
                continue
            self._make_room(newcomer)
            threading.Thread(
                target=self._receive, args=(newcomer, peer), name=f"{self._name}-peer", daemon=True
            ).start()

    def _make_room(self, newcomer: socket.socket) -> None:
        """A flood of connections that say nothing must not keep a peer out."""
        with self._lock:
            self._newcomers[newcomer] = None
            too_many = len(self._newcomers) > self._limits.newcomers
            oldest = next(iter(self._newcomers))
            if too_many:
                del self._newcomers[oldest]
        if too_many:
            self._warn("%s: more than %d connections at the door", self._name, self._limits.newcomers)
            _hang_up(oldest)

    def _receive(self, connection: socket.socket, peer: str) -> None:
        try:
            connection.settimeout(self._limits.greeting)
            self._door.greet(connection)
            if self._let_in(connection):
                self._converse(connection, peer)
        except UnreadableError as error:
            self._warn("%s: hung up on %s: %s", self._name, peer, error)
        # ValueError: what ssl says of a socket that was closed.
        except (OSError, EOFError, ValueError) as error:
            log.debug("%s: %s: %s", self._name, peer, error)
        finally:
            connection.close()
            with self._lock:
                self._newcomers.pop(connection, None)
                self._connections.discard(connection)

    def _let_in(self, connection: socket.socket) -> bool:
        with self._lock:
            self._newcomers.pop(connection, None)
            has_room = len(self._connections) < self._limits.connections
            if has_room and not self._closed:
                self._connections.add(connection)
        if not has_room:
            self._warn("%s: refused a connection: %d are open", self._name, self._limits.connections)
        return has_room and not self._closed


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Also of a connection that is in a TLS handshake; the thread that talks through it closes it.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
