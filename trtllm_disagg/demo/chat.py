"""A streamed chat completion with nothing but the standard library."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are seconds since the epoch, as spans have them in nanoseconds."""

    text: str
    sent: float
    first_text: float
    done: float


def stream_chat(
    base_url: str,
    model: str,
    question: str,
    *,
    max_tokens: int,
    on_text: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Raises OSError when the deployment does not answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    parts: list[str] = []
    sent = time.time()
    first_text = 0.0
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        for event in _events(response):
            for text in _texts(event):
                first_text = first_text or time.time()
                parts.append(text)
                on_text(text)
    done = time.time()
    return Answer("".join(parts), sent, first_text or done, done)


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.decode().removeprefix("data: ").strip()
        if line.startswith(b"data: ") and data != "[DONE]":
            yield json.loads(data)


def _texts(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices", ()):
        if text := choice["delta"].get("content"):
            yield text


_PIECES = re.compile(r"\n| +|[^ \n]+")


class WrappedText:
    """Text that comes in pieces, in lines that end between words.

    A word is written when it is whole: that is seen from what follows it.
    """

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
