"""What the kernel says of a process in /proc/PID/stat."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec


def birth(pid: int) -> int:
    """When `pid` started, in clock ticks since boot: tells a reused pid from the real one. 0 when it is gone or only a
    zombie.
    """
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
    """Whether any thread of that process is running, or would if it had a core."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if _fields(str(thread))[0] == b"R":
                return True
    return False


def _fields(stat: str) -> list[bytes]:
    """From the state on: the name before it may contain anything, spaces and parentheses too."""
    # Asked before each pull of KV: unbuffered bytes take a third of the time of `Path.read_text`.
    with open(stat, "rb", buffering=0) as file:
        return file.read().rpartition(b")")[2].split()
