"""Attention of a step's decode rows on the CPU: one kernel call for all of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from trtllm_disagg.embedded import attend_kernels
from trtllm_disagg.embedded.scheduler import Row
from trtllm_disagg.embedded.views import as_array


class DecodeRows:
    """The leading rows of a step that decode: block tables and lengths, built once and used by every layer."""

    def __init__(self, rows: Seq[Row], tokens_per_block: int) -> None:
        self.count = len(rows)
        self._tokens_per_block = tokens_per_block
        self._contexts = np.array([row.sequence.num_computed + 1 for row in rows], np.int64)
        lengths = -(-self._contexts // tokens_per_block)
        self.tables = np.zeros((len(rows), int(lengths.max())), np.int64)
        for table, row, length in zip(self.tables, rows, lengths, strict=True):
            table[:length] = row.sequence.blocks[:length]
        #: (rows,) int64: where each row's token stands in its sequence, and where its K and V go.
        self.positions = self._contexts - 1
        block = self.tables[np.arange(self.count), self.positions // tokens_per_block]
        self.slots = block * tokens_per_block + self.positions % tokens_per_block
        self._starts: dict[int, np.ndarray] = {}
        self._longest = int(self._contexts.max())
        self._scores = np.empty((0, 0), np.float32)

    @classmethod
    def of(cls, rows: Seq[Row], tokens_per_block: int) -> DecodeRows | None:
        """None when no row decodes. The scheduler puts decode rows first."""
        decode = [row for row in rows if not row.sequence.in_prefill]
        return cls(decode, tokens_per_block) if decode else None

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> None:
        """query and out (rows, heads, dim); keys and values are the layer's pool (slots, kv heads, dim)."""
        if self._scores.shape[0] < query.shape[1]:
            self._scores = np.empty((query.shape[1], self._longest), np.float32)
        attend_kernels.attend_rows(
            as_array(query),
            as_array(keys),
            as_array(values),
            self.tables,
            self._contexts,
            self._starts_for(window or 0),
            self._tokens_per_block,
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
