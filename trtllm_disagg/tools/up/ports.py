"""Ports for the processes of a deployment. Two deployments on one machine never pick the same ports.

A port that is free when it is picked may be in use before its process listens on it. So a process that picks ports
keeps a socket bound to each, without listening: as all servers set SO_REUSEADDR, the one that gets the port can listen
on it, and nothing that picks ports as here can bind it.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Sequence

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.plan import LOOPBACK, PortInUseError

# Dynamo reads DYN_SYSTEM_PORT as a signed 16 bit number. The kernel takes ephemeral ports from above these.
SYSTEM_PORTS = range(20000, 32768)


class OwnPorts:
    """Gives out each port of `among` at most once, to this object or to one in another process, while both exist."""

    def __init__(self, among: Sequence[int] = SYSTEM_PORTS) -> None:
        self._among = among
        # From a random one on: others begin elsewhere, and most of these are neighbours.
        first = random.randrange(len(among))
        self._left = [*among[first:], *among[:first]][::-1]
        #: Descriptors of sockets.
        self._held: list[int] = []
        self._one_at_a_time = threading.Lock()

    def take(self, count: int, host: str) -> list[int]:
        """Ports on which a process can listen at `host` now. Raises PortInUseError when there are too few."""
        taken: list[int] = []
        with self._one_at_a_time:
            while len(taken) < count:
                if not self._left:
                    raise PortInUseError(
                        f"{count} free ports are needed in {self._among}, {len(taken)} were found"
                    )
                if self._hold(host, port := self._left.pop()):
                    taken.append(port)
        return taken

    def close(self) -> None:
        for held in self._held:
            os.close(held)

    def _hold(self, host: str, port: int) -> bool:
        """Whether this object holds the port now, and nothing else does or listens there."""
        held = socket.socket(_family(host))
        try:
            held.bind((host, port))
        except OSError:
            held.close()
            return False
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.append(held.detach())
        return True


_OWN_PORTS = OwnPorts()


def free_system_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Distinct ports, mainly for the workers' health and metrics, held until this process ends."""
    return _OWN_PORTS.take(count, host)


def free_http_port(host: str, port: int) -> int:
    """`port` itself, or any free one when it is 0. Raises ConfigError for a host that has no address, PortInUseError
    when `port` is in use.
    """
    try:
        socket.getaddrinfo(host, port)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: no name can be like that
        allowed = f"an address or a name of this machine ({error})"
        raise ConfigError.bad_value("--http-host", host, allowed) from None
    try:
        _listener(host, port).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        allowed = f"a port on {host} that can be listened on ({reason}); 0 takes any free one"
        raise PortInUseError.bad_value("--http-port", port, allowed) from None
    return port or free_system_ports(1, host)[0]


def is_free(host: str, port: int) -> bool:
    try:
        _listener(host, port).close()
    except OSError:
        return False
    return True


def _listener(host: str, port: int) -> socket.socket:
    # create_server sets SO_REUSEADDR: connections of a previous run in TIME_WAIT do not count as use.
    return socket.create_server((host, port), family=_family(host))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
