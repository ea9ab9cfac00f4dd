"""Records from the engine's receiver thread to whoever polls for them: events, statistics."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any


class Feed:
    """Bounded; the oldest records are dropped. One asyncio reader at a time waits without polling."""

    def __init__(self, max_size: int | None) -> None:
        self._records: deque[dict[str, Any]] = deque(maxlen=max_size)
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def extend(self, records: Iterable[dict[str, Any]]) -> None:
        """From any thread."""
        before = len(self._records)
        self._records.extend(records)
        waiter = self._waiter
        if waiter is not None and len(self._records) != before:
            loop, event = waiter
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(event.set)

    def take(self) -> list[dict[str, Any]]:
        return [self._records.popleft() for _ in range(len(self._records))]

    async def wait(self, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """What is there; when nothing is, what comes within `timeout` seconds. What the reader leaves stays."""
        if not self._records and timeout:
            event = asyncio.Event()
            self._waiter = (asyncio.get_running_loop(), event)
            with contextlib.suppress(TimeoutError):
                if not self._records:  # it may have come before the waiter stood
                    await asyncio.wait_for(event.wait(), timeout)
            self._waiter = None
        while self._records:
            yield self._records.popleft()
