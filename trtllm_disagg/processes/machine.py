"""This machine: its processes, and the limits that a worker can reach."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from trtllm_disagg.errors import ConfigError

# -- processes


def birth(pid: int) -> int:
    """When `pid` started, in clock ticks since boot, which tells a reused pid. 0 if the process is gone or a zombie."""
    try:
        state, *fields = _fields(f"/proc/{pid}/stat")
    except OSError:
        return 0
    return 0 if state in b"ZX" else int(fields[18])


class ProcessMark(msgspec.Struct, frozen=True):
    """Tells a process of this host from a later one with the same id."""

    pid: int
    #: `birth` of that process.
    started: int

    @property
    def is_running(self) -> bool:
        return birth(self.pid) == self.started


def own_mark() -> ProcessMark:
    return ProcessMark(os.getpid(), birth(os.getpid()))


def _fields(stat: str) -> list[bytes]:
    """The fields from the state on. The name before it may contain spaces and parentheses."""
    # Called before each pull of KV: unbuffered bytes take a third of the time of `Path.read_text`.
    with open(stat, "rb", buffering=0) as file:
        return file.read().rpartition(b")")[2].split()


# -- the user at the other end of a Unix socket

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


# -- limits: a process that reaches one later cannot name it

INOTIFY_KEY = "fs.inotify.max_user_instances"
_INOTIFY, _RDMA = Path("/proc/sys/fs/inotify/max_user_instances"), Path("/sys/class/infiniband")
#: Inotify instances, measured: Dynamo opens one for each watched directory. A frontend has 9 to 13, a worker with
#: peers 2, and one that selects peers by their caches 6 more. The minima, so that nothing that would work is refused.
INOTIFY_PER_FRONTEND, INOTIFY_PER_WORKER, INOTIFY_PER_KV_ROUTER = 9, 2, 6
#: An idle process has about 90 open files (measured), and one more for each connection.
OPEN_FILES, MANY_OPEN_FILES = 128, 1024


@dataclass(frozen=True)
class Needs:
    """The least resources that a deployment needs. A transport of KV checks by itself what it needs."""

    inotify_instances: int = 0
    #: For each process.
    open_files: int = OPEN_FILES
    moves_kv: bool = False

    def __add__(self, other: Needs) -> Needs:
        """The needs of two deployments that run side by side."""
        files, moves_kv = max(self.open_files, other.open_files), self.moves_kv or other.moves_kv
        return Needs(self.inotify_instances + other.inotify_instances, files, moves_kv)


@dataclass(frozen=True)
class MachineLimits:
    """The limits of this machine. None where unknown."""

    max_inotify_instances: int | None = None
    #: How many more this user can open, but at most the number that is needed.
    free_inotify_instances: int | None = None
    #: The hard limit; `allow_open_files` raises the soft limit to it.
    max_open_files: int | None = None
    #: Bytes that a process may lock. KV that moves by RDMA is locked as a whole.
    max_locked_memory: int | None = None

    @classmethod
    def read(cls, needs: Needs) -> MachineLimits:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        has_rdma = _RDMA.is_dir() and any(_RDMA.iterdir())
        return cls(
            max_inotify_instances=int(_INOTIFY.read_text()) if _INOTIFY.is_file() else None,
            free_inotify_instances=_free_inotify_instances(needs.inotify_instances),
            max_open_files=None if hard == resource.RLIM_INFINITY else hard,
            max_locked_memory=None if locked == resource.RLIM_INFINITY or not has_rdma else locked,
        )


def needs_of_worker(*, has_peers: bool, discovery_backend: str | None) -> Needs:
    """The needs of a worker that is started by itself. Only file discovery watches directories."""
    return Needs(INOTIFY_PER_WORKER if has_peers and discovery_backend == "file" else 0, moves_kv=has_peers)


def require(needs: Needs, limits: MachineLimits) -> list[str]:
    """One sentence for each possible shortage. Raises ConfigError, with the command that helps, for a certain one."""
    refusals, warnings = [], []
    free, most = limits.free_inotify_instances, limits.max_inotify_instances
    if free is not None and free < needs.inotify_instances:
        refusals.append(
            f"{INOTIFY_KEY} is {most or 'unknown'}, of which this user's processes leave {free}; "
            f"{needs.inotify_instances} are needed. Stop another deployment, or: "
            f"sudo sysctl {INOTIFY_KEY}={max(1024, 2 * (most or 0))}"
        )
    files = limits.max_open_files
    if files is not None and files < needs.open_files:
        refusals.append(
            f"the hard limit of open files (ulimit -Hn) is {files}; each process needs {needs.open_files}, and one "
            f"more a connection. As root: ulimit -Hn {MANY_OPEN_FILES}, or LimitNOFILE= of the service"
        )
    elif files is not None and files < MANY_OPEN_FILES:
        warnings.append(
            f"the hard limit of open files (ulimit -Hn) is {files}: enough for some "
            f"{files - needs.open_files} connections"
        )
    if needs.moves_kv and limits.max_locked_memory is not None:
        warnings.append(
            f"the hard limit of locked memory (ulimit -Hl) is {limits.max_locked_memory // 1024} KiB, and KV "
            "that moves by RDMA is locked: set it to unlimited (LimitMEMLOCK=, or --ulimit memlock=-1 of the container)"
        )
    if refusals:
        raise ConfigError("; ".join(refusals))
    return warnings


def check_limits(needs: Needs) -> list[str]:
    """Raise the limit of open files, then `require` these needs of this machine."""
    allow_open_files()
    return require(needs, MachineLimits.read(needs))


def allow_open_files() -> None:
    """Raise the soft limit to the hard limit, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _free_inotify_instances(wanted: int) -> int | None:
    """Opens instances to find out: those of other processes cannot be counted, because some processes share theirs."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return None
    found: list[int] = []
    try:
        while len(found) < wanted and (fd := libc.inotify_init1(os.O_CLOEXEC)) >= 0:
            found.append(fd)
        return len(found)
    finally:
        for fd in found:
            os.close(fd)
