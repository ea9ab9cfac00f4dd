"""Polls the engine for records in a thread, because TensorRT-LLM's readers block the calling thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from trtllm_disagg.processes.reports import RateLimitedLog

log = logging.getLogger(__name__)

#: As in Dynamo's own worker. TensorRT-LLM's readers, although named `..._async`, block for their timeout before they
#: return an iterator. So the timeout is short, and `PollingPublisher` sleeps between polls.
STATS_TIMEOUT, EVENTS_TIMEOUT = 0.01, 0.0
_SHORTEST_PAUSE, _LONGEST_PAUSE, _PAUSE_GROWTH = 0.01, 0.1, 2.0
_PAUSE_AFTER_ERROR = 1.0
#: Records of one poll. Without a limit, an iterator that is always ready would never let its reader publish.
_MOST_RECORDS = 256


class PollingPublisher(ABC):
    """Polls from start to stop, in a thread with its own event loop. A failed poll is logged, and polling goes on."""

    #: How long a stop waits for the thread. One that hangs in the engine ends with the process.
    stop_seconds = 2.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._polling: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    @abstractmethod
    def records(self) -> AsyncIterator[dict[str, Any]]:
        """The records that the engine has now. May block."""

    @abstractmethod
    def publish(self, records: list[dict[str, Any]]) -> None:
        """Publish records, at least one. Runs in the same thread."""

    async def poll(self) -> bool:
        """Poll once, and return whether there were records."""
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
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(task.cancel)
        await asyncio.to_thread(self._thread.join, self.stop_seconds)
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
        # A reader that always raises is asked again each second.
        warn = RateLimitedLog(log)
        while not self._stopping.is_set():
            try:
                has_found = await self.poll()
                pause = _SHORTEST_PAUSE if has_found else min(_LONGEST_PAUSE, pause * _PAUSE_GROWTH)
            except Exception as error:
                log.debug("%s: where it failed", self._name, exc_info=True)
                warn("%s: publishing failed: %s: %s", self._name, type(error).__name__, error)
                pause = _PAUSE_AFTER_ERROR
            await asyncio.sleep(pause)
