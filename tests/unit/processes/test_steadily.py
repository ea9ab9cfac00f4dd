"""No silence while something takes long."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trtllm_disagg.processes import steadily as module
from trtllm_disagg.processes.steadily import SECONDS, steadily


class Clock(threading.Event):
    """Time passes when it is waited for, and the event never comes before `end`."""

    def __init__(self, end: float) -> None:
        super().__init__()
        self.now, self.end = 0.0, end
        self.ended = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        if self.now < self.end:
            return False
        self.ended.set()
        return super().wait()


def test_a_line_comes_at_once_and_then_every_few_seconds() -> None:
    clock, said = Clock(end=30.0), list[str]()
    with steadily("loading", said.append, clock=lambda: clock.now, over=clock):
        assert said[0] == "loading"
        clock.ended.wait()
    assert said == ["loading", *(f"loading: {second} s" for second in (5, 10, 15, 20, 25))]
    assert SECONDS <= 10


def test_the_lines_end_with_an_error_too() -> None:
    said: list[str] = []
    with pytest.raises(ValueError), steadily("loading", said.append):
        raise ValueError
    assert said == ["loading"]
    assert "steadily" not in {thread.name for thread in threading.enumerate()}


def test_the_program_says_what_it_runs_and_ends_as_that_does() -> None:
    program = Path(module.__file__)
    done = subprocess.run(
        [sys.executable, "-I", str(program), "1/4 torch", sys.executable, "-c", "print('hello'); exit(3)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.splitlines(), done.returncode) == (["1/4 torch", "hello"], 3)
