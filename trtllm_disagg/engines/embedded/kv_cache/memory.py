"""What happens to the blocks of an engine's KV memory besides attention: the start of one is copied, those of a paused
sequence are put aside. The memory itself is in pool.py.

Blocks and slots are plain numbers, so that the same commands can be sent to every rank's part of the pool, or to an
engine that has none.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import msgspec

from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager
from trtllm_disagg.engines.embedded.params.llm_args import KvCacheConfig


class CopyStart(msgspec.Struct, tag="copy_start"):
    """The first `num_tokens` of a block into another one."""

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
    """Room for the KV of paused sequences: at most `max_blocks` blocks are kept aside."""

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
        """The blocks that hold these tokens' KV; None when there is no room."""
        used = blocks[: -(-num_tokens // self._tokens_per_block)]
        if self.num_used + len(used) > self._max_blocks or not used:
            return None
        slot, self._next = self._next, self._next + 1
        self._memory.apply(Save(slot, list(used)))
        self._sizes[slot] = len(used)
        return Saved(slot, num_tokens)

    def restore(self, saved: Saved, num_known: int, blocks: Seq[int]) -> None:
        """Into a sequence's blocks, but for the first `num_known`, which hold it already."""
        missing = blocks[num_known : self._sizes[saved.slot]]
        if missing:
            self._memory.apply(Restore(saved.slot, num_known, list(missing)))

    def drop(self, saved: Saved) -> None:
        self._memory.apply(Drop(saved.slot))
        del self._sizes[saved.slot]


class PartialReuse:
    """Reuse of a block of which only the first tokens are wanted (kv_cache_config.enable_partial_reuse)."""

    def __init__(self, config: KvCacheConfig, blocks: BlockManager, memory: KvMemory) -> None:
        self._is_on = config.enable_block_reuse and config.enable_partial_reuse
        self._copies = config.copy_on_partial_reuse
        self._blocks = blocks
        self._memory = memory

    def allocate(self, count: int, parent: bytes, tokens: Seq[int], salt: bytes) -> tuple[list[int], int]:
        """`count` blocks, and for how many of `tokens`, which come after the block of key `parent`, the first of
        them holds the KV already.
        """
        found = self._blocks.match_start(parent, tokens, salt) if self._is_on else None
        if found is None or not (self._copies or self._blocks.is_spare(found.block)):
            return self._blocks.allocate(count), 0
        if not self._copies:  # a block that no other sequence needs is written on from there
            self._blocks.take_over(found.block)
            return [found.block, *self._blocks.allocate(count - 1)], found.num_tokens
        # It was useful just now, so it is evicted last; and even then its content is still there.
        self._blocks.touch(found.block)
        fresh = self._blocks.allocate(count)
        self._memory.apply(CopyStart(found.block, fresh[0], found.num_tokens))
        return fresh, found.num_tokens
