"""The two channels: results on stdout, and on stderr one line that says what is being measured.

The line is rewritten on a terminal and appended anywhere else.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console

#: Columns that the widest table needs; rich would cut it to 80 in a file.
_WIDTH = 120
_CLEAR = "\r\x1b[K"


class Progress:
    def __init__(self, name: str) -> None:
        self._name = name
        self._started = time.monotonic()
        self._rewrites = sys.stderr.isatty()

    def say(self, text: str) -> None:
        line = f"bench {self._name} [{time.monotonic() - self._started:4.0f} s] {text}"
        print(
            f"{_CLEAR}{line}" if self._rewrites else line, end="" if self._rewrites else "\n", file=sys.stderr
        )
        sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rewrites:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def wide_console() -> Console:
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console
