"""Commands that copy the start of a block, or put a paused sequence's blocks aside. The memory itself is in pool.py.

Blocks and slots are plain numbers, so the same commands work for every rank's pool, or an engine without one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import msgspec

from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager
from trtllm_disagg.engines.embedded.params.llm_args import KvCacheConfig


class CopyStart(msgspec.Struct, tag="copy_start"):
    """Copy the first `num_tokens` of a block into another."""

    source: int
    target: int
    num_tokens: int


class Save(msgspec.Struct, tag="save"):
    """Put a copy of these blocks aside under a number."""

    slot: int
    blocks: list[int]


class Restore(msgspec.Struct, tag="restore"):
    """Copy the saved blocks, from index `first` on, into the first of `blocks`."""

    slot: int
    first: int
    blocks: list[int]


class Drop(msgspec.Struct, tag="drop"):
    """Free the saved copy."""

    slot: int


KvCommand = CopyStart | Save | Restore | Drop


class KvMemory(Protocol):
    def apply(self, command: KvCommand) -> None: ...


class Saved(NamedTuple):
    slot: int
    num_tokens: int


class SwapSpace:
    """Holds the KV of paused sequences, at most `max_blocks` blocks."""

    def __init__(self, memory: KvMemory, max_blocks: int, tokens_per_block: int) -> None:
        self._memory = memory
        self._max_blocks = max_blocks
        self._tokens_per_block = tokens_per_block
        self._sizes: dict[int, int] = {}
        self._next = 0

    @property
    def num_used(self) -> int:
        return sum(self._sizes.values())

    def save(self, blocks: Seq[int], num_tokens: int) -> Saved | None:
        """Save the blocks of these tokens; None if there is no room."""
        used = blocks[: -(-num_tokens // self._tokens_per_block)]
        if self.num_used + len(used) > self._max_blocks or not used:
            return None
        slot, self._next = self._next, self._next + 1
        self._memory.apply(Save(slot, list(used)))
        self._sizes[slot] = len(used)
        return Saved(slot, num_tokens)

    def restore(self, saved: Saved, num_known: int, blocks: Seq[int]) -> None:
        """Copy into a sequence's blocks, except the first `num_known`, which already hold their KV."""
        missing = blocks[num_known : self._sizes[saved.slot]]
        if missing:
            self._memory.apply(Restore(saved.slot, num_known, list(missing)))

    def drop(self, saved: Saved) -> None:
        self._memory.apply(Drop(saved.slot))
        del self._sizes[saved.slot]


class PartialReuse:
    """Reuses the start of a block (kv_cache_config.enable_partial_reuse)."""

    def __init__(self, config: KvCacheConfig, blocks: BlockManager, memory: KvMemory) -> None:
        self._is_on = config.enable_block_reuse and config.enable_partial_reuse
        self._copies = config.copy_on_partial_reuse
        self._blocks = blocks
        self._memory = memory

    def allocate(self, count: int, parent: bytes, tokens: Seq[int], salt: bytes) -> tuple[list[int], int]:
        """`count` blocks to follow the block of key `parent`, and the number of `tokens` that the first one holds."""
        found = self._blocks.match_start(parent, tokens, salt) if self._is_on else None
        if found is None or not (self._copies or self._blocks.is_spare(found.block)):
            return self._blocks.allocate(count), 0
        if not self._copies:  # continue in the spare block itself
            self._blocks.take_over(found.block)
            return [found.block, *self._blocks.allocate(count - 1)], found.num_tokens
        # Touched, it is evicted last; even if evicted now, its content can still be copied.
        self._blocks.touch(found.block)
        fresh = self._blocks.allocate(count)
        self._memory.apply(CopyStart(found.block, fresh[0], found.num_tokens))
        return fresh, found.num_tokens
