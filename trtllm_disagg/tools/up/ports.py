"""Picks ports for the processes of a deployment. Two deployments on one machine never pick the same ports.

A picked port could be taken before its process listens. So the picking process keeps a bound socket on each, without
listening: servers set SO_REUSEADDR, so the intended one can still listen, but no other picker can bind it.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterable, Sequence

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.plan import LOOPBACK, PortInUseError

# Dynamo reads DYN_SYSTEM_PORT as a signed 16 bit number; ephemeral ports lie above these.
SYSTEM_PORTS = range(20000, 32768)


class OwnPorts:
    """Gives out each port of `among` at most once, also across processes, while the objects exist."""

    def __init__(self, among: Sequence[int] = SYSTEM_PORTS) -> None:
        self._among = among
        # Starts at a random port, so that pickers rarely collide.
        first = random.randrange(len(among))
        self._left = [*among[first:], *among[:first]][::-1]
        #: Port -> descriptor.
        self._held: dict[int, int] = {}
        self._one_at_a_time = threading.Lock()

    def take(self, count: int, host: str) -> list[int]:
        """Ports on which a process can listen at `host` now. Raises PortInUseError if too few."""
        found: list[int] = []
        with self._one_at_a_time:
            while len(found) < count:
                if not self._left:
                    raise PortInUseError(f"found {len(found)} free ports in {self._among}, need {count}")
                if self._hold(host, port := self._left.pop()):
                    found.append(port)
        return found

    def close(self) -> None:
        self.give_back([*self._held])

    def give_back(self, ports: Iterable[int]) -> None:
        with self._one_at_a_time:
            for port in ports:
                if (held := self._held.pop(port, None)) is not None:
                    os.close(held)
                    self._left.insert(0, port)

    def _hold(self, host: str, port: int) -> bool:
        """Whether this object could bind the port, and no process listens there."""
        held = socket.socket(_family(host))
        try:
            held.bind((host, port))
        except OSError:
            held.close()
            return False
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held[port] = held.detach()
        return True


_OWN_PORTS = OwnPorts()


def free_system_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Distinct ports, for workers' health and metrics, held until `give_back` or this process's end."""
    return _OWN_PORTS.take(count, host)


def give_back(ports: Iterable[int]) -> None:
    """Ports of processes that are gone. `up` may start thousands, each with a descriptor for its port."""
    _OWN_PORTS.give_back(ports)


def free_http_port(host: str, port: int) -> int:
    """`port`, or any free one if it is 0. Raises ConfigError for a host without an address, PortInUseError for a used
    port.
    """
    try:
        socket.getaddrinfo(host, port)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: impossible as a name
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
    # create_server sets SO_REUSEADDR, so TIME_WAIT connections of a previous run do not block the port.
    return socket.create_server((host, port), family=_family(host))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
