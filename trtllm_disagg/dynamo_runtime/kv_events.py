"""Publishes the engine's KV cache events to the indexes of the frontend's router and of the peers' routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trtllm_disagg.dynamo_runtime.metrics import DynamoMetrics
from trtllm_disagg.engine.cache_events import CacheEvents, StoredBlocks
from trtllm_disagg.handlers.decide import CachedPrefixes


class KvEventForwarder:
    """Forwards cache events to routers, from `start` to `stop`: a source for each rank and each kind of router. Opened
    again, its routers forget what they heard of the sources before.
    """

    def __init__(
        self,
        events: CacheEvents,
        openers: Mapping[int, Sequence[Callable[[], Any]]],
        metrics: DynamoMetrics,
    ) -> None:
        """`openers`: rank -> what opens its sources, Dynamo's KvEventPublisher. A source has an entry in discovery,
        where routers find it, until its `shutdown`.
        """
        self._events, self._openers, self._metrics = events, openers, metrics
        self._sources: dict[int, list[Any]] = {}

    async def start(self) -> None:
        self._events.subscribe(self)

    async def stop(self) -> None:
        self._events.unsubscribe(self)
        self._close()

    def open(self) -> None:
        self._close()
        self._sources = {rank: [each() for each in openers] for rank, openers in self._openers.items()}

    def stored(self, rank: int, blocks: StoredBlocks) -> None:
        for source in self._sources.get(rank, ()):
            source.publish_stored(**blocks._asdict())

    def removed(self, rank: int, block_hashes: list[int]) -> None:
        for source in self._sources.get(rank, ()):
            source.publish_removed(block_hashes)

    def lost(self, rank: int, count: int) -> None:
        self._metrics.lost_events(count)

    def polled(self, count: int) -> None:
        self._metrics.polled_events(count)

    def _close(self) -> None:
        sources, self._sources = self._sources, {}
        for source in (source for of_rank in sources.values() for source in of_rank):
            with suppress(Exception):  # its runtime may have ended, and it with that
                source.shutdown()


class OwnCache:
    """Keeps this worker's own view of its cache, on the event loop that serves requests."""

    def __init__(self, events: CacheEvents, cached: CachedPrefixes, num_ranks: int) -> None:
        self._events, self._cached, self._num_ranks = events, cached, num_ranks
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        self._events.subscribe(self)

    async def stop(self) -> None:
        self._events.unsubscribe(self)

    def open(self) -> None:
        for rank in range(self._num_ranks):
            self._forget(rank)

    def stored(self, rank: int, blocks: StoredBlocks) -> None:
        self._loop.call_soon_threadsafe(lambda: self._cached.of_rank(rank).publish_stored(**blocks._asdict()))

    def removed(self, rank: int, block_hashes: list[int]) -> None:
        self._loop.call_soon_threadsafe(lambda: self._cached.of_rank(rank).publish_removed(block_hashes))

    def lost(self, rank: int, count: int) -> None:
        self._forget(rank)

    def polled(self, count: int) -> None:
        """It does not matter how many came."""

    def _forget(self, rank: int) -> None:
        """Until it is stored again, nothing counts as cached."""
        self._loop.call_soon_threadsafe(lambda: self._cached.of_rank(rank).clear())
