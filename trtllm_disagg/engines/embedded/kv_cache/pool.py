"""The KV memory of an engine: the pool that attention reads and writes, and the copies of its blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from trtllm_disagg.engines.embedded.kv_cache.memory import CopyStart, Drop, KvCommand, Restore, Save


class KvPool:
    """The KV memory of an engine: `kv[block, layer, k|v, slot, head, dim]`, so that a block moves to another engine as
    one range of bytes.

    Seen as `rows` (rows, head, dim), a token's *place* is the row of its key in the first layer; `key_row` and
    `value_row` say how far behind that its key and value of a layer are.
    """

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        _, num_layers, _, self.tokens_per_block, num_heads, head_dim = kv.shape
        self.rows_per_block = 2 * num_layers * self.tokens_per_block
        self.rows = kv.view(-1, num_heads, head_dim)
        #: K or V of a block in a layer.
        self._parts = kv.view(-1, self.tokens_per_block, num_heads, head_dim)
        self._parts_per_block = 2 * num_layers

    def key_row(self, layer: int) -> int:
        return 2 * layer * self.tokens_per_block

    def value_row(self, layer: int) -> int:
        return self.key_row(layer) + self.tokens_per_block

    def keys_and_values(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's part of these blocks (int64), one behind the other: copies (tokens, heads, dim)."""
        first = blocks * self._parts_per_block + 2 * layer
        keys, values = (self._parts.index_select(0, first + kind).flatten(0, 1) for kind in (0, 1))
        return keys, values


class LocalKvMemory:
    """KV memory of this process: `kv[block, layer, k|v, slot, head, dim]`. Copies are kept in main memory."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv
        self.saved: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def apply(self, command: KvCommand) -> None:
        match command:
            case CopyStart(source, target, num_tokens):
                self._kv[target, :, :, :num_tokens] = self._kv[source, :, :, :num_tokens]
            case Save(slot, blocks):
                self.saved[slot] = self._kv.index_select(0, self._index(blocks)).cpu()
            case Restore(slot, first, blocks):
                saved = self.saved[slot][first : first + len(blocks)].to(self._kv.device)
                self._kv.index_copy_(0, self._index(blocks[: len(saved)]), saved)
            case Drop(slot):
                del self.saved[slot]

    def _index(self, blocks: Seq[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.long, device=self._kv.device)
