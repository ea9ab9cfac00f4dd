"""How the process of a worker ends."""

from __future__ import annotations

import subprocess

from trtllm_disagg.interpreter import python

#: Says what is done at its end, in order.
ENDING = """
import atexit, sys
from trtllm_disagg.worker_command import ExitStatus

class Late:
    def __del__(self):
        print("taken apart", flush=True)

late = Late()
status = ExitStatus()
atexit.register(print, "exit handler")
status.value = 3
if "raise" in sys.argv:
    raise RuntimeError("a bug")
"""


def end(*argv: str) -> subprocess.CompletedProcess[str]:
    command = python("-c", ENDING, *argv)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_worker_ends_with_its_status_before_python_is_taken_apart() -> None:
    done = end()
    assert (done.returncode, done.stdout) == (3, "exit handler\n")


def test_a_bug_is_still_told() -> None:
    done = end("raise")
    assert "RuntimeError: a bug" in done.stderr
    assert done.returncode == 3
