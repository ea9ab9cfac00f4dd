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
    over, began = over or threading.Event(), clock()

    def go_on() -> None:
        while not over.wait(SECONDS):
            say(f"{what}: {clock() - began:.0f} s")

    say(what)
    thread = threading.Thread(target=go_on, name="steadily", daemon=True)
    thread.start()
    try:
        yield
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
