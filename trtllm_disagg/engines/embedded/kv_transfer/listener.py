"""Accepts connections of peers, keeps their number within limits, and gives each a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_disagg.engines.embedded.kv_transfer.access import PeerAuthentication
from trtllm_disagg.processes.framing import UnreadableError, receive_frame
from trtllm_disagg.processes.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20
_ACCEPT_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds, and numbers of connections. A peer needs one connection."""

    #: Most authenticated connections.
    connections: int = 512
    #: Most connections that are not authenticated yet; beyond that the oldest one is closed.
    newcomers: int = 64
    greeting: float = 5.0
    idle: float = 120.0
    #: From a frame's first byte to its last one; and for sending an answer.
    frame: float = 10.0


class PeerListener:
    """Serves peers on its own threads, so that a long engine step delays none of them."""

    def __init__(
        self,
        authentication: PeerAuthentication,
        converse: Callable[[socket.socket, str], None],
        name: str,
        limits: Limits,
    ) -> None:
        """`converse` gets a connection and the peer's name; it serves the peer until the connection ends, or raises
        OSError, EOFError or UnreadableError. Raises ConfigError for a host that it cannot listen on.
        """
        self._authentication = authentication
        self._converse = converse
        self._name = name
        self._limits = limits
        self._lock = threading.Lock()
        #: Oldest first.
        self._newcomers: dict[socket.socket, None] = {}
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._warn = RateLimitedLog(log)
        self._listener, self.endpoint = authentication.listen()
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
        hang_up(self._listener)
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._listener.close()
        with self._lock:
            open_now = [*self._connections, *self._newcomers]
        for connection in open_now:
            hang_up(connection)

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
                newcomer, peer = self._authentication.screen(connection)
            except OSError as error:
                self._warn("%s: refused a connection: %s", self._name, error)
                connection.close()
                continue
            self._make_room(newcomer)
            self._serve(newcomer, peer)

    def _serve(self, newcomer: socket.socket, peer: str) -> None:
        """On a thread of its own; a peer for which the system has none is refused, and may come again."""
        thread = threading.Thread(
            target=self._receive, args=(newcomer, peer), name=f"{self._name}-peer", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._warn("%s: refused a connection: %s", self._name, error)
            newcomer.close()
            with self._lock:
                self._newcomers.pop(newcomer, None)

    def _make_room(self, newcomer: socket.socket) -> None:
        """Close the oldest unauthenticated connection of too many, so that a flood of them keeps no peer out."""
        with self._lock:
            self._newcomers[newcomer] = None
            too_many = len(self._newcomers) > self._limits.newcomers
            oldest = next(iter(self._newcomers))
            if too_many:
                del self._newcomers[oldest]
        if too_many:
            self._warn(
                "%s: more than %d connections at the authentication", self._name, self._limits.newcomers
            )
            hang_up(oldest)

    def _receive(self, connection: socket.socket, peer: str) -> None:
        try:
            connection.settimeout(self._limits.greeting)
            self._authentication.greet(connection)
            if self._admit(connection):
                self._converse(connection, peer)
        except UnreadableError as error:
            self._warn("%s: hung up on %s: %s", self._name, peer, error)
        # ValueError: ssl raises it for a socket that was closed.
        except (OSError, EOFError, ValueError) as error:
            log.debug("%s: %s: %s", self._name, peer, error)
        finally:
            connection.close()
            with self._lock:
                self._newcomers.pop(connection, None)
                self._connections.discard(connection)

    def _admit(self, connection: socket.socket) -> bool:
        with self._lock:
            self._newcomers.pop(connection, None)
            has_room = len(self._connections) < self._limits.connections
            if has_room and not self._closed:
                self._connections.add(connection)
        if not has_room:
            self._warn("%s: refused a connection: %d are open", self._name, self._limits.connections)
        return has_room and not self._closed


def hang_up(connection: socket.socket) -> None:
    """Wakes the thread that waits for this connection."""
    with contextlib.suppress(OSError):
        # Works during a TLS handshake too; the connection's own thread closes it.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def receive_message(connection: socket.socket, limits: Limits, at_once: int = 1) -> bytes | None:
    """The next frame, within `idle` and `frame` seconds; None when the peer has hung up. The answer then
    has `frame` seconds to be sent. `at_once`: more than one byte where nothing follows a message before its answer.
    """
    connection.settimeout(limits.idle)
    first = connection.recv(at_once)
    if not first:
        return None
    message = receive_frame(connection, seconds=limits.frame, max_bytes=MAX_MESSAGE_BYTES, begun=first)
    connection.settimeout(limits.frame)
    return message
