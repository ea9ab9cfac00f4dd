"""Paged KV accounting: which sequences use a block, which blocks hold a reusable prefix, and events for the router.

A block is in one of four states, which `check()` proves: free; in use (reference count > 0); cached (no user, but its
content is a known prefix: reusable until evicted, oldest first); quarantined (a late write may still land in it).
"""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from trtllm_disagg.engines.embedded.ipc.messages import PlacedImage
from trtllm_disagg.engines.embedded.kv_cache.virtual_ids import Part, mm_key, parts_of, real_ids, wide_ids
from trtllm_disagg.errors import EngineError

Tokens = tuple[int, ...]


class Found(NamedTuple):
    block: int
    #: Length of the common start, in tokens.
    num_tokens: int


class PartialIndex:
    """Finds the known block that shares the longest start with given tokens. Blocks are of one size, and two with the
    same parent differ.

    A parent's blocks are sorted by tokens, so the best match is one of the two neighbours.
    """

    def __init__(self) -> None:
        self._below: dict[bytes, list[tuple[Tokens, int]]] = {}
        self._place_of: dict[int, tuple[bytes, Tokens]] = {}

    def add(self, parent: bytes, tokens: Seq[int], block: int) -> None:
        content = tuple(tokens)
        self._place_of[block] = (parent, content)
        bisect.insort(self._below.setdefault(parent, []), (content, block))

    def remove(self, block: int) -> None:
        parent, tokens = self._place_of.pop(block)
        siblings = self._below[parent]
        del siblings[bisect.bisect_left(siblings, (tokens, block))]
        if not siblings:
            del self._below[parent]

    def longest(self, parent: bytes, tokens: Seq[int]) -> Found | None:
        """The block below `parent` with the longest common start; None if there is none."""
        siblings = self._below.get(parent)
        if siblings is None:
            return None
        wanted = tuple(tokens)
        at = bisect.bisect_left(siblings, (wanted, -1))
        best = Found(-1, 0)
        for content, block in siblings[max(0, at - 1) : at + 1]:
            shared = _shared(content, wanted)
            if shared > best.num_tokens:
                best = Found(block, shared)
        return best if best.num_tokens else None

    def has_children(self, key: bytes) -> bool:
        return key in self._below

    def holds(self, blocks: set[int]) -> bool:
        """True if the index has exactly these blocks."""
        return set(self._place_of) == blocks


def _shared(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix, in tokens."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((count for count, (x, y) in pairs if x != y), min(len(a), len(b)))


ROOT = b""


def block_key(parent: bytes, tokens: Seq[int], salt: bytes = b"", parts: Seq[Part] = ()) -> bytes:
    """Key of a full block by its content and everything before (16 bytes; the first 8 are the event's hash).
    `parts`: of images in the block.
    """
    hasher = hashlib.blake2b(parent or salt, digest_size=16)
    hasher.update(array("I", tokens).tobytes())
    for part in parts:
        hasher.update(part.image.digest + part.offset.to_bytes(4, "little"))
    return hasher.digest()


class BlockManager:
    def __init__(
        self, num_blocks: int, tokens_per_block: int, *, enable_reuse: bool, events: KvEventLog
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._enable_reuse = enable_reuse
        self.events = events
        # popitem() takes from the end: low ids first.
        self.free_blocks: dict[int, None] = dict.fromkeys(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self.key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._partial = PartialIndex()
        self._quarantined: set[int] = set()
        #: Hits and misses among blocks of admitted prompts; the caller that admits them counts.
        self.reused_blocks = self.missed_blocks = 0
        self.allocated_blocks = 0
        self.events.created(num_blocks)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones, and cached ones that would be evicted."""
        return len(self.free_blocks) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    # -- prefix reuse

    def prompt_keys(self, prompt: Seq[int], salt: bytes, images: Seq[PlacedImage] = ()) -> list[bytes]:
        """Keys of the prompt's full blocks, first to last."""
        size, keys, parent = self.tokens_per_block, [], ROOT
        for start in range(0, len(prompt) - size + 1, size):
            end = start + size
            parent = block_key(parent, prompt[start:end], salt, parts_of(images, start, end))
            keys.append(parent)
        return keys

    def match(self, keys: Seq[bytes]) -> list[int]:
        """The longest run of known blocks from the start. Not acquired yet."""
        blocks: list[int] = []
        if self._enable_reuse:
            for key in keys:
                block = self._block_of.get(key)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def match_start(self, parent: bytes, tokens: Seq[int], salt: bytes) -> Found | None:
        """The known block after `parent` (ROOT: none) that shares the longest start with `tokens` (wide ids for
        images), when no whole block matches. Not acquired yet.
        """
        return self._partial.longest(parent or salt, tokens)

    def is_spare(self, block: int) -> bool:
        """True for a known block without a user and without known children."""
        return block in self._cached and not self._partial.has_children(self.key_of[block])

    def take_over(self, block: int) -> None:
        """Become the only user of a spare block, and forget its content."""
        del self._cached[block]
        self._forget(block)
        self._refs[block] = 1

    def touch(self, block: int) -> None:
        """Count a known block as used just now, without acquiring it."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def acquire(self, blocks: Seq[int]) -> None:
        """Become a user of known blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def commit(
        self,
        tokens: Seq[int],
        blocks: Seq[int],
        keys: list[bytes],
        salt: bytes,
        cache_salt: str = "",
        images: Seq[PlacedImage] = (),
    ) -> None:
        """Record that the full blocks of `tokens` hold their KV. `keys` has those of earlier calls, and grows.
        `cache_salt`: the salt as the client wrote it, for the router.

        Content that is known elsewhere stays there. If it was evicted since, our block becomes its place, so that a
        stored block's parent is always known.
        """
        size = self.tokens_per_block
        full = len(tokens) // size
        if not self._enable_reuse or full <= len(keys):
            return
        first = len(self.match(keys))
        for start in range(len(keys) * size, full * size, size):
            end = start + size
            parts = parts_of(images, start, end)
            keys.append(block_key(keys[-1] if keys else ROOT, tokens[start:end], salt, parts))
        parent = keys[first - 1] if first else ROOT
        new: list[StoredBlock] = []
        for i in range(first, full):
            key, block = keys[i], blocks[i]
            if key in self._block_of:
                self.events.stored(parent, new, cache_salt)
                parent, new = key, []
            else:
                content, parts = tokens[i * size : (i + 1) * size], parts_of(images, i * size, (i + 1) * size)
                self._block_of[key], self.key_of[block] = block, key
                self._partial.add((keys[i - 1] if i else ROOT) or salt, wide_ids(content, parts), block)
                new.append(StoredBlock(key, content, parts))
        self.events.stored(parent, new, cache_salt)

    # -- allocation

    def can_allocate(self, count: int, besides: Seq[int] = ()) -> bool:
        """True if `count` blocks are available after acquiring the known blocks `besides`."""
        return count <= self.num_available - sum(self._refs[block] == 0 for block in besides)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks in ascending order, so that transfers can merge neighbours into runs.

        Raises EngineError if there are too few; callers ask `can_allocate` first.
        """
        if not self.can_allocate(count):
            raise EngineError(f"{count} KV blocks wanted, {self.num_available} available")
        blocks = sorted(self._take() for _ in range(count))
        for block in blocks:
            self._refs[block] = 1
        self.allocated_blocks += count
        return blocks

    def release(self, blocks: Seq[int]) -> None:
        """Stop using blocks, the last first, so that a prefix is evicted from its end."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self.key_of:
                    self._cached[block] = None
                else:
                    self.free_blocks[block] = None

    def quarantine(self, blocks: Seq[int]) -> None:
        """Keep blocks out of use until `restore`: a late write may still land in them."""
        for block in blocks:
            self._refs[block] = 0
            self._quarantined.add(block)

    def restore(self, blocks: Seq[int]) -> None:
        """Free quarantined blocks: no write can land in them any more."""
        for block in blocks:
            self._quarantined.remove(block)
            self.free_blocks[block] = None

    def _take(self) -> int:
        if self.free_blocks:
            return self.free_blocks.popitem()[0]
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        key = self.key_of.pop(block)
        del self._block_of[key]
        self._partial.remove(block)
        self.events.removed(key)

    # -- invariants

    def check(self) -> None:
        """Raise EngineError unless every block is in exactly one state and the prefix index is consistent."""
        used = {block for block, refs in enumerate(self._refs) if refs > 0}
        states = [set(self.free_blocks), set(self._cached), used, self._quarantined]
        if sum(map(len, states)) != self.num_blocks or len(set().union(*states)) != self.num_blocks:
            counts = dict(zip(("free", "cached", "used", "quarantined"), map(len, states), strict=True))
            raise EngineError(f"KV block accounting is broken: {counts} of {self.num_blocks}")
        if {block: key for key, block in self._block_of.items()} != self.key_of or set(
            self.free_blocks
        ) & set(self.key_of):
            raise EngineError("KV prefix index is broken")
        if not self._partial.holds(set(self.key_of)):
            raise EngineError("KV partial-block index is broken")


class StoredBlock(NamedTuple):
    """Content of a block that an event announces."""

    key: bytes
    tokens: Seq[int]
    parts: Seq[Part] = ()


class KvEventLog:
    """KV cache events in TensorRT-LLM's format; the oldest are dropped when full."""

    def __init__(self, max_size: int, window_size: int) -> None:
        self._max_size = max_size
        self._window_size = window_size
        self._next_id = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=max_size)

    def created(self, num_blocks: int) -> None:
        self._add({"type": "created", "num_blocks_per_cache_level": [num_blocks, 0]})

    def stored(self, parent: bytes, blocks: Seq[StoredBlock], cache_salt: str = "") -> None:
        if blocks and self._max_size:
            self._add(
                {
                    "type": "stored",
                    "parent_hash": event_hash(parent) if parent else None,
                    "blocks": [_stored_block(block, cache_salt) for block in blocks],
                }
            )

    def removed(self, key: bytes) -> None:
        self._add({"type": "removed", "block_hashes": [event_hash(key)]})

    def take(self) -> list[dict[str, Any]]:
        events = list(self._events)
        self._events.clear()
        return events

    def _add(self, data: dict[str, Any]) -> None:
        if not self._max_size:
            return
        self._events.append({"event_id": self._next_id, "data": data, "window_size": self._window_size})
        self._next_id += 1


def event_hash(key: bytes) -> int:
    """A block's hash in events: unsigned 64 bits."""
    return int.from_bytes(key[:8], "little")


def _stored_block(stored: StoredBlock, cache_salt: str) -> dict[str, Any]:
    tokens = real_ids(stored.tokens, stored.parts)
    block = {
        "type": "stored_block",
        "block_hash": event_hash(stored.key),
        "tokens": [{"type": "unique_token", "token_id": int(t), "token_extra_id": 0} for t in tokens],
        "cache_level": 0,
        "priority": 35,
    }
    if stored.parts:
        block["mm_keys"] = [mm_key(part) for part in stored.parts]
    return block | {"cache_salt": cache_salt} if cache_salt else block
