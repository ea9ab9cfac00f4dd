"""The signals that end a command before it is done."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trtllm_disagg.exit_codes import ExitCode

EXIT_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
}
#: Signals within this time count as one: `timeout`, for example, signals its child and then the whole process group.
ONE_INTERRUPT_SECONDS = 0.3


def is_wanted(number: signal.Signals) -> bool:
    # nohup ignores SIGHUP on purpose.
    return number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


@contextmanager
def ending_as_on_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt the block as Ctrl-C does, so that it ends its processes and removes its files. Then
    it raises SystemExit with the exit code of the first of them.
    """
    received: list[tuple[int, float]] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if received and now - received[-1][1] < ONE_INTERRUPT_SECONDS:
            return
        received.append((number, now))
        # That of asyncio while a loop runs. A shell's background job ignores SIGINT, but not these signals.
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
        # After a signal this process ends. A late one of the same interrupt must not end it amid its exit, for which
        # Python gives up its handlers.
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if received else handler)
