"""Kills a worker that has been stopped (SIGSTOP, Ctrl-Z) for some seconds, so that its requests go on elsewhere.

A stopped process keeps its connections, so its frontend, its clients and the worker that called it would wait for ever.
This small process runs beside each worker and reads the kernel's state of the worker and of the processes that it has
started, its engine among them. Only the state T counts, which only a signal causes: a worker that is busy, swapped out
or in a debugger has another state. If the machine or container is paused, so is this process, and that time does not
count.

The process runs this file alone, so only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_LOOK_SECONDS = 0.5


def watch_over_this_process(seconds: float) -> None:
    """Starts a watchdog that runs until this process ends, and is not its child: it is not waited for or signalled."""
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )


class Watch:
    """Counts how long the processes of a worker have been stopped; `look` is called at regular intervals."""

    def __init__(self, pid: int, seconds: float, look_seconds: float = _LOOK_SECONDS) -> None:
        self._pid = pid
        self._most_looks = max(1, round(seconds / look_seconds))
        self._stopped: dict[int, int] = {}

    def look(self) -> list[int]:
        """The processes that have been stopped for so many looks in a row that they must be killed."""
        stopped = [pid for pid in family(self._pid) if is_stopped(pid)]
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in stopped}
        return [pid for pid, looks in self._stopped.items() if looks > self._most_looks]


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; False for a process that is gone."""
    try:
        return b"\nState:\tT " in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    family = [pid]
    for each in family:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                family += map(int, children.read_text().split())
    return family


def _kill(pid: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            if is_stopped(pid):  # checked again: the pid may have been reused before pidfd_open
                _say(f"process {pid} was stopped and has not gone on for {seconds:g} s: killed")
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), "WARNING watchdog:", text, file=sys.stderr, flush=True)


def _watch(pid: int, seconds: float) -> None:
    end = select.poll()
    try:
        end.register(os.pidfd_open(pid), select.POLLIN)
    except OSError as error:  # an old kernel, or a sandbox that forbids the call
        _say(f"process {pid} is not watched over ({error}); when it is stopped, its requests wait")
        return
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = Watch(pid, seconds)
    while not end.poll(_LOOK_SECONDS * 1000):
        for stopped in watch.look():
            _kill(stopped, seconds)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]))
