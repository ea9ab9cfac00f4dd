"""Text that comes in pieces, in lines that end between words."""

from __future__ import annotations

import re
from typing import TextIO

_PIECES = re.compile(r"\n| +|[^ \n]+")


class WrappedText:
    """A word is written when it is whole: that is seen from what follows it."""

    def __init__(self, stream: TextIO, columns: int, indent: str) -> None:
        self._stream = stream
        self._room = columns - len(indent)
        self._indent = indent
        self._used = 0
        self._gap, self._word = "", ""
        stream.write(indent)

    def write(self, text: str) -> None:
        for piece in _PIECES.findall(text):
            if piece == "\n":
                self._flush()
                self._break()
            elif piece.startswith(" "):
                self._flush()
                self._gap += piece
            else:
                self._word += piece
        self._stream.flush()

    def end(self) -> None:
        self._flush()
        self._stream.write("\n")
        self._stream.flush()

    def _flush(self) -> None:
        if not self._word:
            return
        if self._used and self._used + len(self._gap) + len(self._word) > self._room:
            self._break()
        self._stream.write(self._gap + self._word)
        self._used += len(self._gap) + len(self._word)
        self._gap, self._word = "", ""

    def _break(self) -> None:
        self._stream.write(f"\n{self._indent}")
        self._used, self._gap = 0, ""
