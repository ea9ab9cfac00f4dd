"""What the kernel says of a process in /proc/PID/stat."""

from __future__ import annotations

import contextlib
from pathlib import Path


def birth(pid: int) -> int:
    """When `pid` started, in clock ticks since boot: tells a reused pid from the real one. 0 when it is gone or only a
    zombie.
    """
    try:
        state, *fields = _fields(Path(f"/proc/{pid}/stat"))
    except OSError:
        return 0
    return 0 if state in "ZX" else int(fields[18])


def is_computing(pid: int) -> bool:
    """Whether any thread of that process is running, or would if it had a core."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if _fields(thread)[0] == "R":
                return True
    return False


def _fields(stat: Path) -> list[str]:
    """From the state on: the name before it may contain anything, spaces and parentheses too."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()
