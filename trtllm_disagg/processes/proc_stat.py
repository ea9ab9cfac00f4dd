"""Facts about a process from /proc/PID/stat."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec


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


def is_computing(pid: int) -> bool:
    """Whether any thread of the process is running or waiting for a core."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if _fields(str(thread))[0] == b"R":
                return True
    return False


def _fields(stat: str) -> list[bytes]:
    """The fields from the state on. The name before it may contain spaces and parentheses."""
    # Called before each pull of KV: unbuffered bytes take a third of the time of `Path.read_text`.
    with open(stat, "rb", buffering=0) as file:
        return file.read().rpartition(b")")[2].split()
