"""A step's rows as the compiled attention kernels take them: those that decode, and those in prefill."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from trtllm_disagg.engines.embedded.cpu_kernels import decode_attention, prefill_attention
from trtllm_disagg.engines.embedded.cpu_kernels.layer_kernels import as_array
from trtllm_disagg.engines.embedded.cpu_kernels.prefill_tile import QUERIES
from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.model.attention import LayerAttention
from trtllm_disagg.engines.embedded.model.rows import ForwardRow


class DecodeRows:
    """The leading rows of a step that decode: where their blocks begin in the pool, and lengths, for every layer."""

    def __init__(self, rows: Seq[ForwardRow], pool: KvPool) -> None:
        self.count = len(rows)
        self._pool = pool
        size = pool.tokens_per_block
        self._contexts = np.array([row.num_computed + 1 for row in rows], np.int64)
        lengths = -(-self._contexts // size)
        self.tables = _tables(rows, lengths, pool)
        #: (rows,) int64: where each row's token stands in its sequence, and its place in the pool.
        self.positions = self._contexts - 1
        self.places = self.tables[np.arange(self.count), self.positions // size] + self.positions % size
        self._starts: dict[int, np.ndarray] = {}
        self._longest = int(self._contexts.max())
        self._scores = np.empty((0, 0), np.float32)

    @classmethod
    def of(cls, rows: Seq[ForwardRow], pool: KvPool) -> DecodeRows | None:
        """None when no row decodes. The scheduler puts decode rows first."""
        decode = [row for row in rows if not row.in_prefill]
        return cls(decode, pool) if decode else None

    def attend(self, how: LayerAttention, query: torch.Tensor, out: torch.Tensor) -> None:
        """query and out (rows, heads, dim)."""
        if self._scores.shape[0] < query.shape[1]:
            self._scores = np.empty((query.shape[1], self._longest), np.float32)
        decode_attention.attend_rows(
            as_array(query),
            as_array(self._pool.rows),
            self._pool.key_row(how.layer),
            self._pool.tokens_per_block,
            self.tables,
            self._contexts,
            self._starts_for(how.window or 0),
            np.float32(how.scale),
            np.float32(how.softcap or 0.0),
            self._scores,
            as_array(out),
        )

    def _starts_for(self, window: int) -> np.ndarray:
        """The first position that each row sees."""
        if window not in self._starts:
            seen = np.maximum(self._contexts - window, 0) if window else np.zeros_like(self._contexts)
            self._starts[window] = seen
        return self._starts[window]


class PrefillRows:
    """The rows of a step in prefill: where their blocks begin in the pool, and the tiles of their queries."""

    def __init__(self, rows: Seq[ForwardRow], first: int, pool: KvPool) -> None:
        """`first`: index of their first token in the step."""
        self.count = len(rows)
        self._rows = rows
        self._pool = pool
        size = pool.tokens_per_block
        ends = np.array([row.num_computed + row.num_tokens for row in rows], np.int64)
        self._tables = _tables(rows, -(-ends // size), pool)
        #: (tokens,) int64: where each token stands in its sequence, and its place in the pool.
        self.positions = np.concatenate(
            [np.arange(row.num_computed, end) for row, end in zip(rows, ends, strict=True)]
        )
        of_row = np.repeat(np.arange(len(rows)), [row.num_tokens for row in rows])
        self.places = self._tables[of_row, self.positions // size] + self.positions % size
        self._firsts = first + np.cumsum([0, *(row.num_tokens for row in rows[:-1])])
        self._tiles: dict[tuple[int, bool], np.ndarray] = {}

    @classmethod
    def of(cls, rows: Seq[ForwardRow], pool: KvPool) -> PrefillRows | None:
        """None when no row is in prefill, and for heads that the kernel does not take."""
        prefill = [row for row in rows if row.in_prefill]
        if not prefill or not prefill_attention.takes(as_array(pool.rows)):
            return None
        return cls(prefill, len(rows) - len(prefill), pool)

    def attend(
        self, how: LayerAttention, query: torch.Tensor, out: torch.Tensor, *, last_only: bool = False
    ) -> None:
        """query and out (tokens, heads, dim), those of all rows of the step. With `last_only`, only tokens with logits
        are computed.
        """
        pool = self._pool
        kv_heads = pool.kv.shape[-2]
        tiles = self._tiles_for(query.shape[1] // kv_heads, last_only)
        prefill_attention.attend_tiles(
            len(tiles) * kv_heads,
            tiles,
            as_array(query),
            as_array(pool.rows),
            pool.key_row(how.layer),
            pool.tokens_per_block,
            self._tables,
            np.float32(how.scale),
            np.float32(how.softcap or 0.0),
            how.window or 0,
            as_array(out),
        )

    def _tiles_for(self, group: int, last_only: bool) -> np.ndarray:
        """As `prefill_attention.attend_tile` has them; `group`: query heads of a KV head. The longest ones first, so
        that no thread has one left when the others have ended.
        """
        if (group, last_only) not in self._tiles:
            tiles = []
            for i, row in enumerate(self._rows):
                begin = row.num_tokens - row.num_logits if last_only else 0
                end = row.num_tokens * group
                for first in range(begin * group, end, QUERIES):
                    count = min(QUERIES, end - first)
                    tiles.append((i, self._firsts[i], row.num_computed, first, count))
            tiles.sort(key=lambda tile: -(tile[2] + tile[3] // group))
            self._tiles[group, last_only] = np.array(tiles, np.int64).reshape(-1, 5)
        return self._tiles[group, last_only]


def _tables(rows: Seq[ForwardRow], lengths: np.ndarray, pool: KvPool) -> np.ndarray:
    """(rows, blocks) int64: where each row's blocks begin in the pool; `lengths` are the numbers of blocks."""
    tables = np.zeros((len(rows), int(lengths.max())), np.int64)
    for table, row, length in zip(tables, rows, lengths, strict=True):
        table[:length] = row.blocks[:length]
    tables *= pool.rows_per_block
    return tables
