"""Ranks that were stopped (SIGSTOP, a frozen container): not dead, but the others would wait for them for ever."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import psutil

#: Who goes on within this time has done no harm.
_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 1.0


class RankWatch:
    """Asked from time to time by the worker, which outlives all ranks."""

    def __init__(self, pids: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        """Of all ranks, rank 0 first. An engine of one rank keeps nobody waiting but its own requests."""
        self._clock = clock
        self._ranks: dict[int, psutil.Process] = {}
        for rank, pid in enumerate(pids if len(pids) > 1 else ()):
            with contextlib.suppress(psutil.NoSuchProcess):  # whoever misses it tells
                self._ranks[rank] = psutil.Process(pid)
        self._stopped_since: dict[int, float] = {}
        self._next_look = clock()

    def who_stopped(self) -> str | None:
        """Which rank does not go on any more."""
        now = self._clock()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        for rank, process in self._ranks.items():
            if not _is_stopped(process):
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) >= _PATIENCE_SECONDS:
                return (
                    f"rank {rank} of the engine (process {process.pid}) was stopped, "
                    f"and has not gone on for {_PATIENCE_SECONDS:.0f} s"
                )
        return None

    def kill(self) -> None:
        """A stopped process ends in no other way."""
        for process in self._ranks.values():
            with contextlib.suppress(psutil.Error):
                process.kill()


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False
