"""Polls the engine for records, in a thread: TensorRT-LLM's readers block the thread that calls them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Protocol

log = logging.getLogger(__name__)

#: As upstream's worker has them. TensorRT-LLM's readers hold the calling thread for their timeout before they return
#: an iterator, although they are called `..._async`, so the timeout is short and the wait is this project's own.
STATS_TIMEOUT, EVENTS_TIMEOUT = 0.01, 0.0
_SHORTEST_PAUSE, _LONGEST_PAUSE, _PAUSE_GROWTH = 0.01, 0.1, 2.0
_PAUSE_AFTER_ERROR = 1.0
#: An iterator that is always ready would otherwise never let its reader publish.
_MOST_RECORDS = 256
#: An engine that hangs in a call does not keep the worker from ending; the thread ends with the process.
STOP_SECONDS = 2.0


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
    """Polls from start to stop, in a thread with an event loop of its own. A poll that fails is logged; the next one is
    tried all the same.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._polling: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    @abstractmethod
    def records(self) -> AsyncIterator[dict[str, Any]]:
        """What the engine has now. May block."""
        ...

    @abstractmethod
    def publish(self, records: list[dict[str, Any]]) -> None:
        """In the same thread; never with an empty list."""
        ...

    async def poll(self) -> bool:
        """Whether there was something."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(TimeoutError, asyncio.QueueEmpty):
            async for record in self.records():
                found.append(record)
                if len(found) == _MOST_RECORDS:
                    break
        if found:
            self.publish(found)
        return bool(found)

    async def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        if self._thread is None:
            return
        self._stopping.set()
        if self._polling is not None:
            loop, task = self._polling
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(task.cancel)
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if self._thread.is_alive():
            log.warning("%s: the engine does not answer; this worker ends without it", self._name)

    def _work(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._run())

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._polling = asyncio.get_running_loop(), task
        pause = _SHORTEST_PAUSE
        while not self._stopping.is_set():
            try:
                has_found = await self.poll()
                pause = _SHORTEST_PAUSE if has_found else min(_LONGEST_PAUSE, pause * _PAUSE_GROWTH)
            except Exception:
                log.exception("%s: publishing failed", self._name)
                pause = _PAUSE_AFTER_ERROR
            await asyncio.sleep(pause)
