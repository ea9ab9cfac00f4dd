"""Is a process of this host still the one that it was? Process ids are used again."""

from __future__ import annotations

import os

import msgspec


class ProcessMark(msgspec.Struct, frozen=True):
    pid: int
    #: Start time in clock ticks: tells a reused pid from the real one.
    started: int

    @property
    def is_running(self) -> bool:
        try:
            return _start_time(self.pid) == self.started
        except (OSError, IndexError, ValueError):
            return False


def own_mark() -> ProcessMark:
    return ProcessMark(os.getpid(), _start_time(os.getpid()))


def _start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])
