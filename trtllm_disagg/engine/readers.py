"""Reads an engine's statistics and KV events, by one reader each for the engine's lifetime.

TensorRT-LLM binds its asynchronous iterators of both to the first caller's event loop for ever. So each reader is a
thread that calls the method returning a list, and role terms subscribe to it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from trtllm_disagg.common.reports import RateLimitedLog
from trtllm_disagg.engine.cache_events import CacheEvents
from trtllm_disagg.engine.capabilities import event_buffer_of
from trtllm_disagg.engine.engine import Engine

log = logging.getLogger(__name__)

#: As in Dynamo's worker. The calls block for their timeout, so it is short, and a reader sleeps between polls.
STATS_TIMEOUT, EVENTS_TIMEOUT = 0.01, 0.0
_SHORTEST_PAUSE, _LONGEST_PAUSE, _PAUSE_GROWTH = 0.01, 0.1, 2.0
_PAUSE_AFTER_ERROR = 1.0

Records = Sequence[Mapping[str, Any]]


class StatsSink(Protocol):
    def update(self, stat: Mapping[str, Any]) -> None:
        """Take one record of `get_stats`."""


class StatsListener(Protocol):
    def polled(self, records: Records) -> None:
        """Take one poll's records, perhaps none. Called in the reader's thread."""


class Statistics:
    """Forwards the engine's statistics, to `always` even between role terms."""

    def __init__(self, *always: StatsSink) -> None:
        self._always = always
        self._listeners: list[StatsListener] = []
        self._lock = threading.Lock()
        self._warn = RateLimitedLog(log)

    def subscribe(self, listener: StatsListener) -> None:
        with self._lock:
            self._listeners.append(listener)

    def unsubscribe(self, listener: StatsListener) -> None:
        """Call `listener` no more."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def receive(self, records: Records) -> None:
        """Forward one poll's records. A failing listener does not affect the others."""
        with self._lock:
            for receive in (self._update_always, *(each.polled for each in self._listeners)):
                try:
                    receive(records)
                except Exception as error:
                    self._warn("engine-stats: publishing failed: %s: %s", type(error).__name__, error)

    def _update_always(self, records: Records) -> None:
        for stat in records:
            for sink in self._always:
                sink.update(stat)


class Reader:
    """Polls in its own thread from start to stop. Logs a failed poll, and goes on."""

    #: Seconds that a stop waits for the thread. A thread that hangs in the engine ends with the process.
    stop_seconds = 2.0

    def __init__(
        self, name: str, poll: Callable[[], Sequence[Any]], receive: Callable[[Sequence[Any]], None]
    ) -> None:
        """`poll` may block; `receive` gets its result, also an empty one."""
        self._name, self._poll, self._receive = name, poll, receive
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        if self._thread is None:
            return
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, self.stop_seconds)
        if self._thread.is_alive():
            log.warning("%s: the engine does not answer; this worker ends without it", self._name)

    def _run(self) -> None:
        # A poll that always raises is repeated each second.
        warn = RateLimitedLog(log)
        pause = _SHORTEST_PAUSE
        while not self._stopping.wait(pause):
            try:
                found = self._poll()
                self._receive(found)
                pause = _SHORTEST_PAUSE if found else min(_LONGEST_PAUSE, pause * _PAUSE_GROWTH)
            except Exception as error:
                log.debug("%s: where it failed", self._name, exc_info=True)
                warn("%s: reading failed: %s: %s", self._name, type(error).__name__, error)
                pause = _PAUSE_AFTER_ERROR


class EngineReaders:
    """Reads an engine inside an `async with` block. Role terms subscribe to `statistics` and `events`."""

    def __init__(self, engine: Engine, block_size: int, *, reads_statistics: bool) -> None:
        llm = engine.llm
        buffer_size = event_buffer_of(llm)
        self.statistics = Statistics(engine.handoffs)
        self.events = CacheEvents(engine.num_ranks, block_size, buffer_size)
        self._readers: list[Reader] = []
        if reads_statistics:
            poll = partial(llm.get_stats, timeout=STATS_TIMEOUT)
            self._readers.append(Reader("engine-stats", poll, self.statistics.receive))
        if buffer_size:
            poll = partial(llm.get_kv_cache_events, timeout=EVENTS_TIMEOUT)
            self._readers.append(Reader("kv-events", poll, self.events.receive))

    async def __aenter__(self) -> EngineReaders:
        for reader in self._readers:
            reader.start()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(reader.stop() for reader in self._readers))
