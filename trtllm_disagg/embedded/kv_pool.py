"""The KV memory of an engine: paged, a block of all layers in one piece."""

from __future__ import annotations

import torch


class KvPool:
    """`kv[block, layer, k|v, slot, head, dim]`, so that a block moves to another engine as one range of bytes.

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
