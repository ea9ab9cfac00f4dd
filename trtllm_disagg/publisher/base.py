"""A publisher runs beside the handlers for as long as the worker serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from typing import Protocol

log = logging.getLogger(__name__)

#: TensorRT-LLM answers at once when it has nothing.
_PAUSE_SECONDS = 0.01
_PAUSE_AFTER_ERROR_SECONDS = 1.0


class Publisher(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class NullPublisher:
    """Publishing is off."""

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""


class PollingPublisher(ABC):
    """Polls from start to stop. A poll that fails is logged; the next one is tried all the same."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def poll(self) -> None:
        """Fetch what the engine has, and pass it on."""

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            pause = _PAUSE_SECONDS
            try:
                await self.poll()
            except Exception:
                log.exception("%s: publishing failed", self._name)
                pause = _PAUSE_AFTER_ERROR_SECONDS
            await asyncio.sleep(pause)
