"""This machine's processes, and the limits that a worker can reach."""

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
    """When `pid` started, in clock ticks since boot, to detect a reused pid. 0 if the process is gone or a zombie."""
    try:
        state, *fields = _fields(f"/proc/{pid}/stat")
    except OSError:
        return 0
    return 0 if state in b"ZX" else int(fields[18])


class ProcessMark(msgspec.Struct, frozen=True):
    """Distinguishes a process of this host from a later one with its pid."""

    pid: int
    #: `birth` of that process.
    started: int

    @property
    def is_running(self) -> bool:
        return birth(self.pid) == self.started


def own_mark() -> ProcessMark:
    return ProcessMark(os.getpid(), birth(os.getpid()))


def _fields(stat: str) -> list[bytes]:
    """The fields from the state on; the name before it may contain spaces and parentheses."""
    # Called before each pull of KV: unbuffered bytes take a third of `Path.read_text`'s time.
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
#: Inotify instances, measured: Dynamo opens one per watched directory. A frontend has 9 to 13, a worker with peers 2,
#: and 6 more if it selects peers by their caches. These are minima, so that nothing that would work is refused.
INOTIFY_PER_FRONTEND, INOTIFY_PER_WORKER, INOTIFY_PER_KV_ROUTER = 9, 2, 6
#: An idle process has about 90 open files (measured), plus one per connection.
OPEN_FILES, MANY_OPEN_FILES = 128, 1024


@dataclass(frozen=True)
class Needs:
    """A deployment's minimum resources. KV transports check their own needs."""

    inotify_instances: int = 0
    #: For each process.
    open_files: int = OPEN_FILES
    moves_kv: bool = False

    def __add__(self, other: Needs) -> Needs:
        """The needs of two deployments side by side."""
        files, moves_kv = max(self.open_files, other.open_files), self.moves_kv or other.moves_kv
        return Needs(self.inotify_instances + other.inotify_instances, files, moves_kv)


@dataclass(frozen=True)
class MachineLimits:
    """This machine's limits; None: unknown."""

    max_inotify_instances: int | None = None
    #: The number that this user can still open, at most the needed number.
    free_inotify_instances: int | None = None
    #: The hard limit; `allow_open_files` raises the soft limit to it.
    max_open_files: int | None = None
    #: Bytes that a process may lock. RDMA locks all KV.
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
    """The needs of a worker without `up`. Only file discovery watches directories."""
    return Needs(INOTIFY_PER_WORKER if has_peers and discovery_backend == "file" else 0, moves_kv=has_peers)


def require(needs: Needs, limits: MachineLimits) -> list[str]:
    """One sentence per possible shortage. Raises ConfigError, with the remedy, for a certain shortage."""
    refusals, warnings = [], []
    free, total = limits.free_inotify_instances, limits.max_inotify_instances
    if free is not None and free < needs.inotify_instances:
        refusals.append(
            f"{INOTIFY_KEY} is {total or 'unknown'}, of which this user's processes leave {free}; "
            f"{needs.inotify_instances} are needed. Stop another deployment, or: "
            f"sudo sysctl {INOTIFY_KEY}={max(1024, 2 * (total or 0))}"
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
    """Raise the limit of open files, then `require` these needs."""
    allow_open_files()
    return require(needs, MachineLimits.read(needs))


def allow_open_files() -> None:
    """Raise the soft limit to the hard limit, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _free_inotify_instances(wanted: int) -> int | None:
    """Opens instances to find out: processes may share instances, so counting theirs does not work."""
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
