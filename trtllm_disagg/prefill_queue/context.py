"""The context of a request that came through the queue."""

from __future__ import annotations

import asyncio


class PulledContext:
    """A RequestContext: stopped when the pusher says so, or is gone."""

    def __init__(self, request_id: str | None) -> None:
        self._id = request_id
        self._stopped = asyncio.Event()

    def id(self) -> str | None:
        return self._id

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    async def async_killed_or_stopped(self) -> bool:
        return await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()
