"""Ports for the processes of a deployment. Two deployments on one machine never pick the same ports.

A port that is free when it is picked may be in use before its process listens on it. So a process that picks ports
reserves them by locks on files of a directory that no other user may enter. Locks end with the process.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.plan import LOOPBACK, PortInUseError

# Dynamo reads DYN_SYSTEM_PORT as a signed 16 bit number. The kernel takes ephemeral ports from above these.
SYSTEM_PORTS = range(20000, 32768)
#: Number of ports that one lock, which is one open file, reserves.
_BLOCK = 32
_TEMPORARY = Path("/tmp")


class OwnPorts:
    """Gives out each port of `among` at most once, to this object or to one in another process, while both exist."""

    def __init__(self, among: Sequence[int] = SYSTEM_PORTS) -> None:
        self._among = among
        self._locks: list[int] = []
        self._held = self._hold()
        self._one_at_a_time = threading.Lock()

    def take(self, count: int, host: str) -> list[int]:
        """Ports on which a process can listen at `host` now. Raises PortInUseError when there are too few."""
        taken: list[int] = []
        with self._one_at_a_time:
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
        for lock in self._locks:
            os.close(lock)

    def _hold(self) -> Iterator[int]:
        directory = own_directory()
        blocks = [self._among[start : start + _BLOCK] for start in range(0, len(self._among), _BLOCK)]
        for block in random.sample(blocks, len(blocks)):
            if directory is None or self._lock(directory / f"ports-{block[0]}"):
                yield from block

    def _lock(self, file: Path) -> bool:
        """Whether this object has the lock now, and no other process or object."""
        lock = os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._locks.append(lock)
        return True


def own_directory() -> Path | None:
    """A directory of this user only. None where another user has taken its name: then no port is reserved, and a worker
    whose port is in use starts again on another one.
    """
    path = _TEMPORARY / f"trtllm-disagg-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        state = path.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    return path if is_own and not stat.S_IMODE(state.st_mode) & 0o077 else None


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
