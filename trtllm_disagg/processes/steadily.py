"""Long work says what it is, at once and then every few seconds: on a terminal, in a pipe and in a log.

As a program, `python steadily.py WHAT COMMAND ...` says WHAT while the command runs, and needs nothing installed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

#: Between two lines.
SECONDS = 5.0


def _print(line: str) -> None:
    print(line, flush=True)


@contextmanager
def steadily(
    what: str,
    say: Callable[[str], None] = _print,
    *,
    clock: Callable[[], float] = time.monotonic,
    over: threading.Event | None = None,
) -> Iterator[None]:
    """`what` is said when the block begins, and again with the seconds that have passed until it ends."""
    say(what)
    with without_silence(say, what, clock=clock, over=over):
        yield


@contextmanager
def without_silence(
    show: Callable[[str], None],
    first: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    over: threading.Event | None = None,
) -> Iterator[Callable[[str], None]]:
    """What the block says is shown, and after a silence again, with the seconds since it was said; until it says
    anything, `first` is.
    """
    over = over or threading.Event()
    text, began = first, clock()
    shown = began

    def say(new: str) -> None:
        nonlocal text, began, shown
        text, began = new, clock()
        shown = began
        show(text)

    def go_on() -> None:
        nonlocal shown
        while not over.wait(SECONDS):
            now = clock()
            # What was said in between makes no silence of less than ten seconds.
            if now - shown >= SECONDS / 2:
                shown = now
                show(f"{text}: {now - began:.0f} s")

    thread = threading.Thread(target=go_on, name="steadily", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        over.set()
        thread.join()


def main(arguments: Sequence[str]) -> int:
    """The command's own exit status."""
    what, *command = arguments
    with steadily(what):
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
