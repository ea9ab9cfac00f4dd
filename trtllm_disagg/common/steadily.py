"""Prints what a long task does, at once and then every few seconds: on a terminal, in a pipe and in a log.

As a program, `python steadily.py WHAT COMMAND ...` prints WHAT while the command runs. It needs only Python.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

#: Seconds between two lines.
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
    """Print `what` at the block's start, and repeat it with the elapsed seconds until its end."""
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
    """Yield a function that shows texts. After a silence, the last text (initially `first`) is shown with its age."""
    over = over or threading.Event()
    text, began = first, clock()
    shown = began

    def say(new: str) -> None:
        nonlocal text, began, shown
        text, began = new, clock()
        shown = began
        show(text)

    def repeat() -> None:
        nonlocal shown
        while not over.wait(SECONDS):
            now = clock()
            # Half a period counts as silence, so none lasts ten seconds.
            if now - shown >= SECONDS / 2:
                shown = now
                show(f"{text}: {now - began:.0f} s")

    thread = threading.Thread(target=repeat, name="steadily", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        over.set()
        thread.join()


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    what, *command = arguments
    with steadily(what):
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
