"""A request's context without Dynamo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class FakeContext:
    """Dynamo's Context, as far as handlers use it. `stop` is what happens when the client leaves."""

    def __init__(self, request_id: str = "request-1") -> None:
        self._id = request_id
        self._stopped = asyncio.Event()
        self._on_stop: list[Callable[[], object]] = []

    def id(self) -> str:
        return self._id

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    async def async_killed_or_stopped(self) -> bool:
        await self._stopped.wait()
        return True

    def stop(self) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            for callback in self._on_stop:
                callback()

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Called at once when the client has left already."""
        if self._stopped.is_set():
            callback()
        else:
            self._on_stop.append(callback)

    def child(self) -> FakeContext:
        """The other stage's: the same request; it is stopped with this one, or alone."""
        child = FakeContext(self._id)
        self.on_stop(child.stop)
        return child
