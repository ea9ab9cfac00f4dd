"""A process that is stopped for too long is killed; one that is slow, or stopped for a moment, is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trtllm_disagg.common import watchdog
from trtllm_disagg.common.watchdog import Watch, is_stopped

#: Starts a watchdog over itself and a child that sleeps, and says the child's id.
WATCHED = """
import subprocess, sys, time
from trtllm_disagg.common.watchdog import watch_over_this_process
watch_over_this_process(float(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
time.sleep(600)
"""


class Sleepers:
    """A process that a watchdog watches over, and its child."""

    def __init__(self, seconds: float) -> None:
        command = [sys.executable, "-c", WATCHED, str(seconds)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.parent = psutil.Process(self._process.pid)
        self.child = psutil.Process(int(self._process.stdout.readline()))

    def end(self) -> None:
        for process in (self.child, self.parent):
            if process.is_running():
                process.kill()
        self._process.communicate(timeout=30)

    def said(self) -> str:
        """After its end."""
        return self._process.communicate(timeout=30)[1]


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    made = Sleepers(seconds=1.0)
    yield made
    made.end()


def watchdogs(pid: int) -> list[psutil.Process]:
    """Of the process `pid`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if [Path(word).name for word in words[3:4]] == ["watchdog.py"] and words[4:5] == [str(pid)]:
            found.append(process)
    return found


def test_stopped_process_is_killed_with_a_log_line(sleepers: Sleepers) -> None:
    sleepers.parent.suspend()
    gone, _ = psutil.wait_procs([sleepers.parent], timeout=30)
    assert gone
    sleepers.child.kill()
    assert f"process {sleepers.parent.pid} was stopped" in sleepers.said()


def test_stopped_child_is_killed_and_its_parent_is_not(sleepers: Sleepers) -> None:
    sleepers.child.suspend()
    gone, _ = psutil.wait_procs([sleepers.child], timeout=30)
    assert gone
    assert sleepers.parent.is_running()


def test_the_watchdog_is_no_child_and_ends_with_the_process(sleepers: Sleepers) -> None:
    assert sleepers.parent.children() == [sleepers.child]
    (watchdog,) = watchdogs(sleepers.parent.pid)
    sleepers.end()
    gone, _ = psutil.wait_procs([watchdog], timeout=30)
    assert gone


def test_resumed_process_resets_the_watchdogs_count(sleepers: Sleepers) -> None:
    watch = Watch(sleepers.parent.pid, seconds=1.0, look_seconds=0.5)
    # Two looks would be the limit, so none of these is one too many, however slow this machine is.
    for _ in range(3):
        sleepers.child.suspend()
        assert watch.look() == []
        sleepers.child.resume()
        assert watch.look() == []


def test_watchdog_counts_looks_and_not_elapsed_time(sleepers: Sleepers) -> None:
    """A machine that slept has stopped the watchdog as well."""
    watch = Watch(sleepers.parent.pid, seconds=1000.0)
    sleepers.child.suspend()
    assert watch.look() == []


def test_a_process_that_is_busy_or_gone_is_not_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    process.wait()
    assert not is_stopped(process.pid)
    assert not is_stopped(os.getpid())


def test_process_that_cannot_be_watched_is_logged() -> None:
    command = [sys.executable, "-I", "-S", watchdog.__file__, str(2**22 + 1), "1"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert f"cannot watch process {2**22 + 1}" in done.stderr
