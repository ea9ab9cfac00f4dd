"""How busy others kept the machine while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import psutil


class BusyCores:
    """From now on, beside this process and those of `pids`, which must live until `others` is called."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in (os.getpid(), *pids)]
        self._started, self._all, self._own = time.monotonic(), _busy_seconds(), self._own_seconds()

    def others(self) -> float:
        """Cores, on average; time stolen from a virtual machine is one of the others."""
        busy = _busy_seconds() - self._all - (self._own_seconds() - self._own)
        return max(0.0, busy / (time.monotonic() - self._started))

    def _own_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return float(sum(t.user + t.system for t in times))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
