"""Ports for the processes of a deployment. Two deployments on one machine never pick the same ports.

A port that is free when it is picked may be in use before its process listens on it. So a process that picks ports
reserves them by binding an abstract Unix socket with their name: such names are unique in a network namespace, as ports
are, and end with the process.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator, Sequence

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.plan import LOOPBACK, PortInUseError

# Dynamo reads DYN_SYSTEM_PORT as a signed 16 bit number. The kernel takes ephemeral ports from above these.
SYSTEM_PORTS = range(20000, 32768)
#: Number of ports that one name, which is one open file, reserves.
_BLOCK = 32


class OwnPorts:
    """Gives out each port of `among` at most once, to this object or to one in another process, while both exist."""

    def __init__(self, among: Sequence[int] = SYSTEM_PORTS) -> None:
        self._among = among
        self._names: list[socket.socket] = []
        self._held = self._hold()
        self._lock = threading.Lock()

    def take(self, count: int, host: str) -> list[int]:
        """Ports on which a process can listen at `host` now. Raises PortInUseError when there are too few."""
        taken: list[int] = []
        with self._lock:
            while len(taken) < count:
                port = next(self._held, None)
                if port is None:
                    raise PortInUseError(
                        f"{count} free ports are needed in {self._among}, {len(taken)} were found"
                    )
                if is_free(host, port):
                    taken.append(port)
        return taken

    def close(self) -> None:
        for name in self._names:
            name.close()

    def _hold(self) -> Iterator[int]:
        blocks = [self._among[start : start + _BLOCK] for start in range(0, len(self._among), _BLOCK)]
        for block in random.sample(blocks, len(blocks)):
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                name.bind(f"\0trtllm-disagg/ports/{block[0]}")
            except OSError:  # another process has reserved them
                name.close()
            else:
                self._names.append(name)
                yield from block


_OWN_PORTS = OwnPorts()


def free_system_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Distinct ports, mainly for the workers' health and metrics, reserved until this process ends."""
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
