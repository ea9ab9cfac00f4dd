"""Reuse of a block of which only the first tokens are wanted (kv_cache_config.enable_partial_reuse)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from trtllm_disagg.embedded.kv_cache.block_manager import BlockManager
from trtllm_disagg.embedded.kv_cache.memory import KvMemory
from trtllm_disagg.embedded.params.llm_args import KvCacheConfig


class PartialReuse(Protocol):
    def allocate(self, count: int, parent: bytes, tokens: Seq[int], salt: bytes) -> tuple[list[int], int]:
        """`count` blocks, and for how many of `tokens`, which come after the block of key `parent`, the first of
        them holds the KV already.
        """
        ...


class WholeBlocksOnly:
    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def allocate(self, count: int, parent: bytes, tokens: Seq[int], salt: bytes) -> tuple[list[int], int]:
        return self._blocks.allocate(count), 0


class CopyStart:
    """The block stays as it is, and stays known; its start is copied."""

    def __init__(self, blocks: BlockManager, memory: KvMemory) -> None:
        self._blocks = blocks
        self._memory = memory

    def allocate(self, count: int, parent: bytes, tokens: Seq[int], salt: bytes) -> tuple[list[int], int]:
        found = self._blocks.match_start(parent, tokens, salt)
        if found is None:
            return self._blocks.allocate(count), 0
        # It was useful just now, so it is evicted last; and even then its content is still there.
        self._blocks.touch(found.block)
        fresh = self._blocks.allocate(count)
        self._memory.copy_start(found.block, fresh[0], found.num_tokens)
        return fresh, found.num_tokens


class TakeOver:
    """No copy (copy_on_partial_reuse: false): a block that no other sequence needs is written on from there."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def allocate(self, count: int, parent: bytes, tokens: Seq[int], salt: bytes) -> tuple[list[int], int]:
        found = self._blocks.match_start(parent, tokens, salt)
        if found is None or not self._blocks.is_spare(found.block):
            return self._blocks.allocate(count), 0
        self._blocks.take_over(found.block)
        return [found.block, *self._blocks.allocate(count - 1)], found.num_tokens


def create_partial_reuse(config: KvCacheConfig, blocks: BlockManager, memory: KvMemory) -> PartialReuse:
    if not (config.enable_block_reuse and config.enable_partial_reuse):
        return WholeBlocksOnly(blocks)
    return CopyStart(blocks, memory) if config.copy_on_partial_reuse else TakeOver(blocks)
