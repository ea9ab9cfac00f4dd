"""No silence while something takes long."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trtllm_disagg.common import steadily as module
from trtllm_disagg.common.steadily import SECONDS, steadily, without_silence


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


def test_last_message_is_repeated_only_after_a_silence() -> None:
    clock, said, inside = Clock(end=20.0), list[str](), threading.Event()

    def show(text: str) -> None:
        said.append(text)
        if text == "preparing: 5 s":
            inside.wait()
            clock.now = 8.0
            say("measuring")
            # The thread wakes at 10 and at 15.
            clock.now = 5.0

    with without_silence(show, "preparing", clock=lambda: clock.now, over=clock) as say:
        inside.set()
        assert clock.ended.wait(30)
    assert said == ["preparing: 5 s", "measuring", "measuring: 7 s"]


def test_steadily_ends_its_thread_after_an_error() -> None:
    said: list[str] = []
    with pytest.raises(ValueError), steadily("loading", said.append):
        raise ValueError
    assert said == ["loading"]
    assert "steadily" not in {thread.name for thread in threading.enumerate()}


def test_steadily_prints_the_title_and_exits_with_the_commands_status() -> None:
    program = Path(module.__file__)
    done = subprocess.run(
        [sys.executable, "-I", str(program), "1/4 torch", sys.executable, "-c", "print('hello'); exit(3)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.splitlines(), done.returncode) == (["1/4 torch", "hello"], 3)
