"""The processes of a deployment that run on this machine, as far as this user may look: their environment and what
the system allows them.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

_FRONTEND = "dynamo.frontend"
_ANY = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class LocalProcess:
    pid: int
    environ: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    open_files: int | None = None
    #: None: as many as there are. The same for bytes that it may lock.
    max_open_files: int | None = None
    max_locked_memory: int | None = None

    @property
    def is_frontend(self) -> bool:
        """And not something that passes a port on."""
        return _FRONTEND in self.argv


def listener(host: str, port: int) -> LocalProcess | None:
    """The process of this user that listens at the port; None for another user's, or one on another machine."""
    addresses = {_address_here(host), *_ANY} - {None}
    if len(addresses) == len(_ANY):
        return None
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status != psutil.CONN_LISTEN or not each.laddr or each.pid is None:
                continue
            if each.laddr.port == port and each.laddr.ip in addresses:
                return _described(psutil.Process(each.pid))
    return None


def _described(process: psutil.Process) -> LocalProcess:
    return LocalProcess(
        process.pid,
        process.environ(),
        tuple(process.cmdline()),
        process.num_fds(),
        _limit(process.pid, resource.RLIMIT_NOFILE),
        _limit(process.pid, resource.RLIMIT_MEMLOCK),
    )


def _limit(pid: int, kind: int) -> int | None:
    soft, _ = resource.prlimit(pid, kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _address_here(host: str) -> str | None:
    """The address of `host`; None for another machine's, on which no socket can be bound here."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind(address)
    except OSError:
        return None
    return str(address[0])
