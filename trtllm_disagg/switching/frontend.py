"""Whether a frontend sends requests to a worker already: asked over HTTP, without a token being generated."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Protocol
from urllib.request import Request, urlopen

POLL_SECONDS = 0.05
_TIMEOUT_SECONDS = 5.0


async def knows(url: str, model: str, instance_id: int) -> bool:
    """It refuses a pin to a worker that it does not know, and else answers what it would do, and does nothing."""
    return await asyncio.to_thread(_knows, url, model, instance_id)


def _knows(url: str, model: str, instance_id: int) -> bool:
    # A model may be served under one of the two only.
    return any(
        _would_send(f"{url}/v1/{path}", {"model": model, "max_tokens": 1, **asked}, instance_id)
        for path, asked in _ASKED.items()
    )


def _would_send(url: str, body: dict[str, Any], instance_id: int) -> bool:
    body |= {"nvext": {"annotations": ["query_instance_id:"], "extra_fields": ["worker_id"]}}
    headers = {"content-type": "application/json", "x-dynamo-worker-instance-id": str(instance_id)}
    request = Request(url, json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            answer = json.load(response)
            return bool(answer["nvext"]["worker_id"]["decode_worker_id"] == instance_id)
    except (OSError, ValueError, KeyError, TypeError):
        return False


_ASKED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "?"},
    "chat/completions": {"messages": [{"role": "user", "content": "?"}]},
}


class Frontend(Protocol):
    async def knows(self, model: str, instance_id: int) -> bool:
        """It may send requests of `model` to that worker."""
        ...


class HttpFrontend:
    def __init__(self, url: str) -> None:
        self._url = url

    async def knows(self, model: str, instance_id: int) -> bool:
        return await knows(self._url, model, instance_id)


class UnknownFrontends:
    """Nobody said where they are: they are given some time instead, from the first question on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._asked_at: float | None = None

    async def knows(self, model: str, instance_id: int) -> bool:
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        return now - self._asked_at >= self._seconds
