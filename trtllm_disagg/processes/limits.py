"""Checks the limits of this machine and user before anything starts: a process that reaches a limit later cannot name
it ("Too many open files" is also the error for inotify instances).

A deployment that is certain to fail is refused, and one that may fail gets a warning. Locked memory matters only with
RDMA: sharing memory and reading it by CMA locks none (docs/decisions/0021).
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.dev_shm import DIRECTORY, UCX_FREE, UCX_KEPT, free_bytes, how_to_get, in_mib

INOTIFY_KEY = "fs.inotify.max_user_instances"
_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
#: Where Linux lists devices for RDMA.
_RDMA = Path("/sys/class/infiniband")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
#: Inotify instances, measured: Dynamo opens one for each watched directory. A frontend has 9 to 13, a worker with
#: peers 2, and one that selects peers by their caches 6 more. The minima, so that nothing that would work is refused.
INOTIFY_PER_FRONTEND, INOTIFY_PER_WORKER, INOTIFY_PER_KV_ROUTER = 9, 2, 6
#: An idle process has about 90 open files (measured), and one more for each connection.
OPEN_FILES, MANY_OPEN_FILES = 128, 1024


class LimitError(ConfigError):
    """The machine allows too little of something for this deployment."""


@dataclass(frozen=True)
class Needs:
    """The least resources that a deployment needs."""

    inotify_instances: int = 0
    #: For each process.
    open_files: int = OPEN_FILES
    #: Number of workers on this host that transfer KV.
    peers: int = 0

    def __add__(self, other: Needs) -> Needs:
        """The needs of two deployments that run side by side."""
        return Needs(
            self.inotify_instances + other.inotify_instances,
            max(self.open_files, other.open_files),
            self.peers + other.peers,
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of free space in /dev/shm that UCX needs for all peers."""
        return UCX_FREE + UCX_KEPT * (self.peers - 1) if self.peers else 0


@dataclass(frozen=True)
class MachineLimits:
    """The limits of this machine. None where unknown."""

    max_inotify_instances: int | None = None
    #: How many more this user can open, but at most the number that is needed.
    free_inotify_instances: int | None = None
    #: The hard limit; `allow_open_files` raises the soft limit to it.
    max_open_files: int | None = None
    #: Yama's restriction of reading other processes' memory; it does not bind root.
    ptrace_scope: int | None = None
    is_root: bool = False
    #: Free bytes in /dev/shm.
    free_shared_memory: int | None = None
    #: Bytes that a process may lock; None for no limit, and without RDMA.
    max_locked_memory: int | None = None
    has_rdma: bool = False

    @classmethod
    def read(cls, needs: Needs) -> MachineLimits:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(
            max_inotify_instances=_number_in(_INOTIFY),
            free_inotify_instances=_free_inotify_instances(needs.inotify_instances),
            max_open_files=None if hard == resource.RLIM_INFINITY else hard,
            ptrace_scope=_number_in(_PTRACE_SCOPE),
            is_root=os.geteuid() == 0,
            free_shared_memory=free_bytes(),
            max_locked_memory=_max_locked_memory() if has_rdma() else None,
            has_rdma=has_rdma(),
        )


def needs_of_worker(*, has_peers: bool, discovery_backend: str | None) -> Needs:
    """The needs of a worker that is started by itself. Only file discovery watches directories."""
    watches = has_peers and discovery_backend == "file"
    return Needs(INOTIFY_PER_WORKER if watches else 0, peers=1 if has_peers else 0)


class Shortage(NamedTuple):
    #: One of the names below, or INOTIFY_KEY, or the directory of shared memory.
    about: str
    is_certain: bool
    #: What is short, with the command that helps.
    sentence: str


OPEN_FILES_LIMIT, PTRACE_SCOPE, LOCKED_MEMORY = "open files", "ptrace_scope", "locked memory"


def require(needs: Needs, limits: MachineLimits) -> list[str]:
    """One sentence for each possible shortage. Raises LimitError, with the command that helps, for a certain one."""
    found = list(shortages(needs, limits))
    if refusals := [shortage.sentence for shortage in found if shortage.is_certain]:
        raise LimitError("; ".join(refusals))
    return [shortage.sentence for shortage in found]


def check_limits(needs: Needs) -> list[str]:
    """Raise the limit of open files, then `require` these needs of this machine."""
    allow_open_files()
    return require(needs, MachineLimits.read(needs))


def allow_open_files() -> None:
    """Raise the soft limit to the hard limit, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def shortages(needs: Needs, limits: MachineLimits) -> Iterator[Shortage]:
    """Every resource that may be short, in the order in which a deployment needs them."""
    for check in (_inotify, _open_files, _ptrace, _shared_memory, _locked_memory):
        yield from check(needs, limits)


def _inotify(needs: Needs, limits: MachineLimits) -> Iterator[Shortage]:
    free = limits.free_inotify_instances
    if free is not None and free < needs.inotify_instances:
        most = "unknown" if limits.max_inotify_instances is None else str(limits.max_inotify_instances)
        enough = max(1024, 2 * (limits.max_inotify_instances or 0))
        yield Shortage(
            INOTIFY_KEY,
            True,
            f"{INOTIFY_KEY} is {most}, of which this user's processes leave {free}; "
            f"{needs.inotify_instances} are needed. Stop another deployment, or: sudo sysctl {INOTIFY_KEY}={enough}",
        )


def _open_files(needs: Needs, limits: MachineLimits) -> Iterator[Shortage]:
    files = limits.max_open_files
    if files is not None and files < needs.open_files:
        yield Shortage(
            OPEN_FILES_LIMIT,
            True,
            f"the hard limit of open files (ulimit -Hn) is {files}; each process needs "
            f"{needs.open_files}, and one more a connection. As root: ulimit -Hn {MANY_OPEN_FILES}, or LimitNOFILE= "
            "of the service",
        )
    elif files is not None and files < MANY_OPEN_FILES:
        yield Shortage(
            OPEN_FILES_LIMIT,
            False,
            f"the hard limit of open files (ulimit -Hn) is {files}: enough for some "
            f"{files - needs.open_files} connections",
        )


def _ptrace(needs: Needs, limits: MachineLimits) -> Iterator[Shortage]:
    if limits.ptrace_scope and not limits.is_root:
        yield Shortage(
            PTRACE_SCOPE,
            False,
            f"kernel.yama.ptrace_scope is {limits.ptrace_scope}: processes may not read each other's memory, so the "
            "embedded engine moves KV through shared memory. For NIXL: sudo sysctl kernel.yama.ptrace_scope=0",
        )


def _shared_memory(needs: Needs, limits: MachineLimits) -> Iterator[Shortage]:
    free = limits.free_shared_memory
    if free is not None and free < needs.shared_memory:
        yield Shortage(
            str(DIRECTORY),
            False,
            f"{DIRECTORY} has {in_mib(free)} free, and NIXL between {needs.peers} workers needs "
            f"{in_mib(needs.shared_memory)}; some or all would move KV through shared memory without a name, or be "
            f"refused where NIXL is set: {how_to_get(needs.shared_memory)}",
        )


def _locked_memory(needs: Needs, limits: MachineLimits) -> Iterator[Shortage]:
    if needs.peers and limits.max_locked_memory is not None:
        yield Shortage(
            LOCKED_MEMORY,
            False,
            f"the hard limit of locked memory (ulimit -Hl) is {limits.max_locked_memory // 1024} KiB, and KV that "
            "moves by RDMA is locked as a whole: set it to unlimited (LimitMEMLOCK= of the service, or --ulimit "
            "memlock=-1 of the container)",
        )


def has_rdma() -> bool:
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def _max_locked_memory() -> int | None:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if hard == resource.RLIM_INFINITY else hard


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


def _number_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
