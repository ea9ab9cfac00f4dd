"""Kills a worker that was stopped (SIGSTOP, Ctrl-Z) for seconds, so that other workers continue its requests.

A stopped process keeps its connections, so frontend, clients and calling workers would wait for ever. This small
process runs beside each worker and reads the kernel's state of the worker and its child processes, such as the engine.
Only state T counts, which only a signal causes: a busy, swapped-out or debugged worker has another state. A pause of
the machine or container also pauses this process, and does not count.

It runs this file alone, so it imports only the standard library.
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
    """Start a watchdog that runs until this process ends. It is no child: nothing waits for it or signals it."""
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )


class Watch:
    """Counts how long a worker's processes have been stopped. Call `look` at regular intervals."""

    def __init__(self, pid: int, seconds: float, look_seconds: float = _LOOK_SECONDS) -> None:
        self._pid = pid
        self._max_looks = max(1, round(seconds / look_seconds))
        self._stopped: dict[int, int] = {}

    def look(self) -> list[int]:
        """The processes stopped for enough looks in a row to be killed."""
        stopped = [pid for pid in family(self._pid) if is_stopped(pid)]
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in stopped}
        return [pid for pid, looks in self._stopped.items() if looks > self._max_looks]


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; False if it is gone."""
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
                _say(f"process {pid} was stopped for {seconds:g} s: killed")
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
        _say(f"cannot watch process {pid} ({error}); if it is stopped, its requests wait")
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
