"""A publisher runs beside the handlers for as long as the worker serves."""

from __future__ import annotations

from typing import Protocol


class Publisher(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class NullPublisher:
    """Publishing is off."""

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""
