"""A command's exit codes, and the signals that end it early."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

# -- exit codes (docs/reference/exit-codes.md)


class ExitCode(IntEnum):
    """`meaning`: the text in the documentation's table."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    DONE = 0, "done; `doctor` found no error"
    FAILED = 1, "failed after it began; `doctor` found an error; two orders of `demo` answered differently"
    WRONG_SETTING = 2, "a flag, variable, file or package is missing or wrong; nothing began"
    HANGUP = 129, "stopped by SIGHUP before it was done (`up`: before it was ready)"
    INTERRUPTED = 130, "stopped by Ctrl-C (SIGINT), likewise"
    READER_LEFT = 141, "the reader of its output closed the pipe, as `head` does"
    TERMINATED = 143, "stopped by SIGTERM, likewise"


# -- signals

EXIT_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
}
#: Signals within this time count as one: `timeout`, for example, signals its child, then its process group.
ONE_INTERRUPT_SECONDS = 0.3


def is_wanted(number: signal.Signals) -> bool:
    # nohup ignores SIGHUP on purpose.
    return number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


@contextmanager
def ending_as_on_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt the block like Ctrl-C; SystemExit then has the first signal's exit code."""
    received: list[tuple[int, float]] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if received and now - received[-1][1] < ONE_INTERRUPT_SECONDS:
            return
        received.append((number, now))
        # asyncio's handler while a loop runs. A shell's background job ignores SIGINT, but not these signals.
        of_ctrl_c = signal.getsignal(signal.SIGINT)
        (of_ctrl_c if callable(of_ctrl_c) else signal.default_int_handler)(signal.SIGINT, frame)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if is_wanted(number)]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        if not received:
            raise
        sys.exit(EXIT_CODES[signal.Signals(received[0][0])])
    finally:
        # After a signal this process ends. A late signal of the same interrupt must not disturb the exit, for which
        # Python drops its handlers.
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if received else handler)
