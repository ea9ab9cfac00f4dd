"""Attention of a step's decode rows on the CPU: one kernel call for all of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from trtllm_disagg.embedded.cpu_kernels import attention_kernels as attend_kernels
from trtllm_disagg.embedded.cpu_kernels.views import as_array
from trtllm_disagg.embedded.kv_cache.memory import KvPool
from trtllm_disagg.embedded.model.row import ForwardRow


class DecodeRows:
    """The leading rows of a step that decode: where their blocks begin in the pool, and lengths, for every layer."""

    def __init__(self, rows: Seq[ForwardRow], pool: KvPool) -> None:
        self.count = len(rows)
        self._pool = pool
        size = pool.tokens_per_block
        self._contexts = np.array([row.num_computed + 1 for row in rows], np.int64)
        lengths = -(-self._contexts // size)
        self.tables = np.zeros((len(rows), int(lengths.max())), np.int64)
        for table, row, length in zip(self.tables, rows, lengths, strict=True):
            table[:length] = row.blocks[:length]
        self.tables *= pool.rows_per_block
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

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> None:
        """query and out (rows, heads, dim)."""
        if self._scores.shape[0] < query.shape[1]:
            self._scores = np.empty((query.shape[1], self._longest), np.float32)
        attend_kernels.attend_rows(
            as_array(query),
            as_array(self._pool.rows),
            self._pool.key_row(layer),
            self._pool.tokens_per_block,
            self.tables,
            self._contexts,
            self._starts_for(window or 0),
            np.float32(scale),
            np.float32(softcap or 0.0),
            self._scores,
            as_array(out),
        )

    def _starts_for(self, window: int) -> np.ndarray:
        """The first position that each row sees."""
        if window not in self._starts:
            seen = np.maximum(self._contexts - window, 0) if window else np.zeros_like(self._contexts)
            self._starts[window] = seen
        return self._starts[window]
