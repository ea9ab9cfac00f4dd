"""The blocks of the engine's KV cache, by its events, and the listeners that publish each change."""

from __future__ import annotations

import logging
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from trtllm_disagg.processes.reports import RateLimitedLog

log = logging.getLogger(__name__)

#: Events that reach the listeners under one lock: a listener that subscribes, on the event loop, waits for so many.
_MAX_LOCKED = 256


class StoredBlocks(NamedTuple):
    """Consecutive blocks of one prompt, as a router takes them."""

    token_ids: list[int]
    num_block_tokens: list[int]
    block_hashes: list[int]
    parent_hash: int | None
    cache_salt: str | None


class CacheListener(Protocol):
    """Publishes the cache of every attention-DP rank. Called in the reader's thread; `open` in the caller's."""

    def open(self) -> None:
        """Begin, or begin again, with empty caches; the blocks that are stored now follow."""

    def stored(self, rank: int, blocks: StoredBlocks) -> None: ...

    def removed(self, rank: int, block_hashes: list[int]) -> None: ...

    def lost(self, rank: int, count: int) -> None:
        """The number of events that did not come."""

    def polled(self, count: int) -> None:
        """The number of events that one poll found."""


class CacheEvents:
    """What the engine's cache holds, for as long as the engine lives, and who hears of changes now.

    The engine tells of each block once. So a listener begins with the blocks that are stored now, whenever it comes.
    """

    def __init__(self, num_ranks: int, block_size: int, buffer_size: int) -> None:
        """`buffer_size`: the events that the engine keeps until they are polled."""
        self._ranks = [_RankCache(block_size) for _ in range(num_ranks)]
        self._buffer_size = buffer_size
        self._listeners: list[CacheListener] = []
        #: Events come in the reader's thread; listeners come and go on the event loop.
        self._lock = threading.Lock()
        self._warn = RateLimitedLog(log)

    def subscribe(self, listener: CacheListener) -> None:
        """Raises what the listener's `open` raises."""
        with self._lock:
            self._begin(listener)
            self._listeners.append(listener)

    def unsubscribe(self, listener: CacheListener) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def renew(self) -> None:
        """Open each listener again, as when discovery has dropped its entry."""
        with self._lock:
            for listener in self._listeners:
                self._begin(listener)

    def receive(self, events: Sequence[dict[str, Any]]) -> None:
        """The events of one poll, in TensorRT-LLM's format."""
        # The engine drops the oldest events, and hands over a full buffer.
        is_full = 0 < self._buffer_size <= len(events)
        for start in range(0, len(events), _MAX_LOCKED):
            with self._lock:
                if not start:
                    self._tell("polled", len(events))
                for event in events[start : start + _MAX_LOCKED]:
                    self._receive(event, may_have_overflowed=is_full)

    def _receive(self, event: dict[str, Any], *, may_have_overflowed: bool) -> None:
        try:
            rank = event.get("attention_dp_rank") or 0
            cache = self._ranks[rank]
            if (due := cache.due_before(event)) is not None:
                self._note_gap(rank, event["event_id"], due, may_have_overflowed)
            change = cache.apply(event)
        except Exception as error:
            # Losing this event makes the router's index wrong; losing those after it would make it worse.
            text = "kv-events: an event of the engine cannot be published: %s: %.200s: %.200s"
            self._warn(text, type(error).__name__, error, event)
            return
        if change:
            self._tell("stored" if isinstance(change, StoredBlocks) else "removed", rank, change)

    def _note_gap(self, rank: int, event_id: int, due: int, may_have_overflowed: bool) -> None:
        advice = ""
        if may_have_overflowed and event_id > due:
            advice = f"; raise kv_cache_config.event_buffer_max_size (now {self._buffer_size})"
        text = "KV event %d came where %d was due: the router's view of this cache is stale%s"
        self._warn(text, event_id, due, advice)
        self._tell("lost", rank, max(0, event_id - due))

    def _tell(self, what: str, *arguments: Any) -> None:
        """A listener that fails keeps nothing from the others."""
        for listener in self._listeners:
            try:
                getattr(listener, what)(*arguments)
            except Exception as error:
                self._warn("kv-events: publishing failed: %s: %.200s", type(error).__name__, error)

    def _begin(self, listener: CacheListener) -> None:
        listener.open()
        for rank, cache in enumerate(self._ranks):
            for blocks in cache.stored_now():
                listener.stored(rank, blocks)


class _StoredBlock(NamedTuple):
    tokens: array[int]
    parent_hash: int | None
    cache_salt: str | None


class _RankCache:
    """The cache of one rank. Only full blocks count: the router cannot use a part of one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: By block hash.
        self._blocks: dict[int, _StoredBlock] = {}
        #: Blocks that count as not stored, so that their removal is none either.
        self._unknown: set[int | str] = set()
        self._next_event_id: int | None = None
        self._window = 0

    def due_before(self, event: dict[str, Any]) -> int | None:
        """The id that was due in the place of this event's; None where no event is missing."""
        event_id = event.get("event_id")
        if event_id is None:
            return None
        due, self._next_event_id = self._next_event_id, event_id + 1
        return None if due in (None, event_id) else due

    def apply(self, event: dict[str, Any]) -> StoredBlocks | list[int] | None:
        """What changes: blocks that are stored, or the hashes of blocks that are removed."""
        if not self._is_of_widest_window(event):
            return None
        data = event["data"]
        if data["type"] == "stored":
            return self._stored(data)
        return self._removed(data) if data["type"] == "removed" else None

    def stored_now(self) -> Iterator[StoredBlocks]:
        """Parents first: a router cannot place a block before its parent, which the engine may have dropped and stored
        once more. Blocks without their parent are left out.
        """
        children: dict[int | None, list[int]] = defaultdict(list)
        for block_hash, block in self._blocks.items():
            children[block.parent_hash].append(block_hash)
        waiting = children[None]
        while waiting:
            block_hash = waiting.pop()
            tokens, parent, salt = self._blocks[block_hash]
            yield StoredBlocks(tokens.tolist(), [len(tokens)], [block_hash], parent, salt)
            waiting += children[block_hash]

    def _stored(self, data: dict[str, Any]) -> StoredBlocks | None:
        blocks = data["blocks"]
        whole = list(takewhile(lambda block: len(block["tokens"]) == self._block_size, blocks))
        # Blocks after a part of a block have a parent that the router does not know.
        self._unknown.update(block["block_hash"] for block in blocks[len(whole) :])
        if not whole:
            return None
        parent = None if data["parent_hash"] is None else signed(data["parent_hash"])
        salt = whole[0].get("cache_salt")
        hashes = [signed(block["block_hash"]) for block in whole]
        tokens = [[token["token_id"] for token in block["tokens"]] for block in whole]
        for each_parent, block_hash, each in zip([parent, *hashes], hashes, tokens, strict=False):
            self._blocks[block_hash] = _StoredBlock(array("q", each), each_parent, salt)
        sizes = [self._block_size] * len(whole)
        return StoredBlocks([token for each in tokens for token in each], sizes, hashes, parent, salt)

    def _removed(self, data: dict[str, Any]) -> list[int]:
        known = [signed(block) for block in data["block_hashes"] if block not in self._unknown]
        self._unknown.difference_update(data["block_hashes"])
        for block_hash in known:
            self._blocks.pop(block_hash, None)
        return known

    def _is_of_widest_window(self, event: dict[str, Any]) -> bool:
        """A model with sliding windows sends each event once per window size; the widest one is published."""
        window = event.get("window_size") or 0
        self._window = max(self._window, window)
        return window == self._window


def signed(block_hash: int | str) -> int:
    """The engine's unsigned 64 bits, or the start of its SHA-256 in hexadecimal, as a signed number."""
    number = int(block_hash[:16], 16) if isinstance(block_hash, str) else block_hash
    return number - (1 << 64) if number >= 1 << 63 else number
