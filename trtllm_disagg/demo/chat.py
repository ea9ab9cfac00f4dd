"""A streamed chat completion with nothing but the standard library."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are seconds since the epoch, as in the workers' journals."""

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
