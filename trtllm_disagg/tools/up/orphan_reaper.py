"""Kills the processes of a deployment when its `up` is gone, even after `kill -9` of `up`.

Every process inherits a variable with the deployment's mark, and one with the mark of its own start. The reaper, a tiny
process beside `up`, kills all processes with the deployment's mark when its parent is gone. It runs this file alone, so
this file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

MARK_VARIABLE = "TRTLLM_DISAGG_DEPLOYMENT"
PROCESS_VARIABLE = "TRTLLM_DISAGG_PROCESS"
POLL_SECONDS = 0.1
SWEEP_SECONDS = 0.05
# Several empty sweeps, since a process may be between fork and exec.
CLEAN_SWEEPS = 4
#: A process that survives SIGKILL this long waits for a device, perhaps forever.
MAX_SECONDS = 60.0


def start_reaper(mark: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts this process's reaper with the variables of `environ`; `stop_reaper` ends it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(os.getpid())],
        env={name: environ[name] for name in environ if name not in (MARK_VARIABLE, PROCESS_VARIABLE)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stop_reaper(reaper: subprocess.Popen[bytes]) -> None:
    reaper.kill()
    reaper.wait()


def marked_processes(mark: str, variable: str = MARK_VARIABLE) -> list[int]:
    entry = f"{variable}={mark}".encode()
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and entry in _environment(pid)]


def kill_marked(mark: str, variable: str = MARK_VARIABLE) -> list[int]:
    """Kills all processes with `mark`, and returns their pids."""
    pids = marked_processes(mark, variable)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _watch(mark: str, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    clean, deadline = 0, time.monotonic() + MAX_SECONDS
    while clean < CLEAN_SWEEPS and time.monotonic() < deadline:
        clean = 0 if kill_marked(mark) else clean + 1
        time.sleep(SWEEP_SECONDS)


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]))
