"""Follows the blocks of the engine's KV cache by its events, and tells the listeners that publish each change."""

from __future__ import annotations

import logging
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from trtllm_disagg.common.reports import RateLimitedLog

log = logging.getLogger(__name__)

#: Events delivered under one lock: a listener that subscribes on the event loop waits for as many.
_MAX_LOCKED = 256


class StoredBlocks(NamedTuple):
    """Consecutive blocks of one prompt, in a router's form."""

    token_ids: list[int]
    num_block_tokens: list[int]
    block_hashes: list[int]
    parent_hash: int | None
    cache_salt: str | None
    #: A block's images as Dynamo describes them, None for a block of text. None: all blocks are text.
    block_mm_infos: Sequence[dict[str, Any] | None] | None = None


class CacheListener(Protocol):
    """Publishes every attention-DP rank's cache. Called in the reader's thread; `open` in the caller's."""

    def open(self) -> None:
        """Begin (again) with empty caches; the blocks stored now follow."""

    def stored(self, rank: int, blocks: StoredBlocks) -> None: ...

    def removed(self, rank: int, block_hashes: list[int]) -> None: ...

    def lost(self, rank: int, count: int) -> None:
        """`count` events were lost."""

    def polled(self, count: int) -> None:
        """One poll found `count` events."""


class CacheEvents:
    """The content of the engine's cache, and the listeners to its changes.

    The engine reports each block once, so a new listener begins with the blocks stored now.
    """

    def __init__(self, num_ranks: int, block_size: int, buffer_size: int) -> None:
        """`buffer_size`: the number of events that the engine keeps until a poll."""
        self._ranks = [_RankCache(block_size) for _ in range(num_ranks)]
        self._buffer_size = buffer_size
        self._listeners: list[CacheListener] = []
        #: Events come in the reader's thread, listeners on the event loop.
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
        """Open each listener again, as after discovery dropped its entry."""
        with self._lock:
            for listener in self._listeners:
                self._begin(listener)

    def receive(self, events: Sequence[dict[str, Any]]) -> None:
        """Handle the events of one poll, in TensorRT-LLM's format."""
        # The engine drops the oldest events, and hands over a full buffer.
        is_full = 0 < self._buffer_size <= len(events)
        for start in range(0, len(events), _MAX_LOCKED):
            with self._lock:
                if not start:
                    self._notify("polled", len(events))
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
            # Losing this event makes the router's index wrong; losing later ones would make it worse.
            text = "kv-events: an event of the engine cannot be published: %s: %.200s: %.200s"
            self._warn(text, type(error).__name__, error, event)
            return
        if change:
            self._notify("stored" if isinstance(change, StoredBlocks) else "removed", rank, change)

    def _note_gap(self, rank: int, event_id: int, due: int, may_have_overflowed: bool) -> None:
        advice = ""
        if may_have_overflowed and event_id > due:
            advice = f"; raise kv_cache_config.event_buffer_max_size (now {self._buffer_size})"
        text = "KV event %d came instead of %d: the router's view of this cache is stale%s"
        self._warn(text, event_id, due, advice)
        self._notify("lost", rank, max(0, event_id - due))

    def _notify(self, what: str, *arguments: Any) -> None:
        """A failing listener does not affect the others."""
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
    images: dict[str, Any] | None


class _RankCache:
    """The cache of one rank. Only full blocks count: the router cannot use a part of one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: By block hash.
        self._blocks: dict[int, _StoredBlock] = {}
        #: Blocks that count as not stored; their removal is ignored too.
        self._unknown: set[int | str] = set()
        self._next_event_id: int | None = None
        self._window = 0

    def due_before(self, event: dict[str, Any]) -> int | None:
        """The id expected instead of this event's; None if no event is missing."""
        event_id = event.get("event_id")
        if event_id is None:
            return None
        due, self._next_event_id = self._next_event_id, event_id + 1
        return None if due in (None, event_id) else due

    def apply(self, event: dict[str, Any]) -> StoredBlocks | list[int] | None:
        """The change: stored blocks, or hashes of removed ones."""
        if not self._is_of_widest_window(event):
            return None
        data = event["data"]
        if data["type"] == "stored":
            return self._stored(data)
        return self._removed(data) if data["type"] == "removed" else None

    def stored_now(self) -> Iterator[StoredBlocks]:
        """Parents first, since a router cannot place a block before its parent, which the engine may have dropped and
        stored again. Omits blocks without their parent.
        """
        children: dict[int | None, list[int]] = defaultdict(list)
        for block_hash, block in self._blocks.items():
            children[block.parent_hash].append(block_hash)
        waiting = children[None]
        while waiting:
            block_hash = waiting.pop()
            tokens, parent, salt, images = self._blocks[block_hash]
            infos = [images] if images else None
            yield StoredBlocks(tokens.tolist(), [len(tokens)], [block_hash], parent, salt, infos)
            waiting += children[block_hash]

    def _stored(self, data: dict[str, Any]) -> StoredBlocks | None:
        blocks = data["blocks"]
        whole = list(takewhile(self._is_routable, blocks))
        # The router does not know the parent of blocks after these.
        self._unknown.update(block["block_hash"] for block in blocks[len(whole) :])
        if not whole:
            return None
        parent = None if data["parent_hash"] is None else signed(data["parent_hash"])
        salt = whole[0].get("cache_salt")
        hashes = [signed(block["block_hash"]) for block in whole]
        tokens = [[token["token_id"] for token in block["tokens"]] for block in whole]
        images = [_images(block) for block in whole]
        for before, block_hash, each, of_images in zip(
            [parent, *hashes], hashes, tokens, images, strict=False
        ):
            self._blocks[block_hash] = _StoredBlock(array("q", each), before, salt, of_images)
        flat, sizes = [token for each in tokens for token in each], [self._block_size] * len(whole)
        return StoredBlocks(flat, sizes, hashes, parent, salt, images if any(images) else None)

    def _is_routable(self, block: dict[str, Any]) -> bool:
        tokens = block["tokens"]
        # TensorRT-LLM's second cache manager has an image's digest in place of its first token.
        has_digest = block.get("mm_keys") and any(isinstance(token["token_id"], str) for token in tokens)
        return len(tokens) == self._block_size and not has_digest

    def _removed(self, data: dict[str, Any]) -> list[int]:
        known = [signed(block) for block in data["block_hashes"] if block not in self._unknown]
        self._unknown.difference_update(data["block_hashes"])
        for block_hash in known:
            self._blocks.pop(block_hash, None)
        return known

    def _is_of_widest_window(self, event: dict[str, Any]) -> bool:
        """A model with sliding windows sends each event once per window size; only the widest is published."""
        window = event.get("window_size") or 0
        self._window = max(self._window, window)
        return window == self._window


def _images(block: dict[str, Any]) -> dict[str, Any] | None:
    """The images that a block has tokens of, in their order."""
    if not (keys := block.get("mm_keys")):
        return None
    # As the frontend, which names an image by 64 bits.
    return {"mm_objects": [{"mm_hash": int(key["hash"][:16], 16), "offsets": []} for key in keys]}


def signed(block_hash: int | str) -> int:
    """A signed number from the engine's unsigned 64 bits, or from the start of its hexadecimal SHA-256."""
    number = int(block_hash[:16], 16) if isinstance(block_hash, str) else block_hash
    return number - (1 << 64) if number >= 1 << 63 else number
