"""How this process takes the signals that end one: everything that a test starts inherits what is ignored."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def hear_signals() -> None:
    """What tests start is told to stop by signals. `nohup` and a shell's `&` have a run ignore some, and all that it
    starts with it.
    """
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


@contextmanager
def signals_as_before() -> Iterator[None]:
    """After the block they are taken as before it. A command that was interrupted ignores them until its end, and in a
    test this process goes on.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
