"""Recording stand-ins of the router's publishers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_disagg.engine.cache_events import CacheEvents, StoredBlocks
from trtllm_disagg.handlers.cached_prefix import CachedPrefix


@dataclass(frozen=True, slots=True)
class Stored:
    token_ids: list[int]
    num_block_tokens: list[int]
    block_hashes: list[int]
    parent_hash: int | None
    cache_salt: str | None
    block_mm_infos: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    block_hashes: list[int]


@dataclass(slots=True)
class RecordingEventSink:
    """Dynamo's KvEventPublisher. Like it, refuses numbers above signed 64 bits."""

    events: list[Stored | Removed] = field(default_factory=list)
    is_shut_down: bool = False

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        cache_salt: str | None = None,
        block_mm_infos: Sequence[Any] | None = None,
    ) -> None:
        _check(block_hashes + ([] if parent_hash is None else [parent_hash]))
        if len(token_ids) != sum(num_block_tokens) or len(num_block_tokens) != len(block_hashes):
            raise ValueError("tokens, sizes and hashes do not fit together")
        self.events.append(
            Stored(token_ids, num_block_tokens, block_hashes, parent_hash, cache_salt, block_mm_infos)
        )

    def publish_removed(self, block_hashes: list[int]) -> None:
        _check(block_hashes)
        self.events.append(Removed(block_hashes))

    def shutdown(self) -> None:
        self.is_shut_down = True


class RecordingCacheListener:
    """A role term's listener of one rank's cache; keeps all events since it was opened."""

    def __init__(self) -> None:
        self.events: list[Stored | Removed] = []
        self.times_opened = self.num_lost = 0
        self.polls: list[int] = []

    def open(self) -> None:
        self.events = []
        self.times_opened += 1

    def stored(self, rank: int, blocks: StoredBlocks) -> None:
        self.events.append(Stored(*blocks))

    def removed(self, rank: int, block_hashes: list[int]) -> None:
        self.events.append(Removed(block_hashes))

    def lost(self, rank: int, count: int) -> None:
        self.num_lost += count

    def polled(self, count: int) -> None:
        self.polls.append(count)


class IndexListener(RecordingCacheListener):
    """Updates an index synchronously, without an event loop."""

    def __init__(self, index: CachedPrefix) -> None:
        super().__init__()
        self._index = index

    def stored(self, rank: int, blocks: StoredBlocks) -> None:
        self._index.publish_stored(**blocks._asdict())

    def removed(self, rank: int, block_hashes: list[int]) -> None:
        self._index.publish_removed(block_hashes)


def events_for(listener: RecordingCacheListener, block_size: int) -> CacheEvents:
    """One rank's events with a listener."""
    events = CacheEvents(num_ranks=1, block_size=block_size, buffer_size=0)
    events.subscribe(listener)
    return events


@dataclass(slots=True)
class RecordingLoadSink:
    """Dynamo's WorkerMetricsPublisher: (rank, used blocks) of every call."""

    loads: list[tuple[int | None, int | None]] = field(default_factory=list)

    def publish(
        self, dp_rank: int | None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None
    ) -> None:
        self.loads.append((dp_rank, kv_used_blocks))


@dataclass(slots=True)
class RecordingStatsSink:
    """Keeps every record."""

    stats: list[Mapping[str, Any]] = field(default_factory=list)

    def update(self, stat: Mapping[str, Any]) -> None:
        self.stats.append(stat)


def _check(hashes: list[int]) -> None:
    for block_hash in hashes:
        if not -(1 << 63) <= block_hash < 1 << 63:
            raise OverflowError(f"{block_hash} does not fit 64 signed bits")
