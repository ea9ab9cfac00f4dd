"""`LayerOps` by compiled kernels (layer_kernels.py, attention_kernels.py), float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager

import numpy as np
import torch

from trtllm_disagg.embedded.cpu_kernels import attention_kernels, layer_kernels
from trtllm_disagg.embedded.cpu_kernels.compiled import compiling_told
from trtllm_disagg.embedded.cpu_kernels.layer_kernels import as_array
from trtllm_disagg.embedded.kv_cache.pool import KvPool
from trtllm_disagg.embedded.model.attention import LayerAttention, StepLayout
from trtllm_disagg.embedded.model.fused_decode import FusedDecode
from trtllm_disagg.embedded.model.layer_ops import LayerOps
from trtllm_disagg.embedded.model.plain_model import PlainLayer, PlainModel
from trtllm_disagg.embedded.model.rows import ForwardRow
from trtllm_disagg.processes.activity import Reporter


class DecodeRows:
    """The leading rows of a step that decode: where their blocks begin in the pool, and lengths, for every layer. Their
    attention is one kernel call.
    """

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

    def attend(self, how: LayerAttention, query: torch.Tensor, out: torch.Tensor) -> None:
        """query and out (rows, heads, dim)."""
        if self._scores.shape[0] < query.shape[1]:
            self._scores = np.empty((query.shape[1], self._longest), np.float32)
        attention_kernels.attend_rows(
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


class CompiledOps(LayerOps):
    def compiling_told(self, reporter: Reporter) -> AbstractContextManager[None]:
        return compiling_told(reporter)

    def prepare(self, pool: KvPool, dtype: torch.dtype) -> None:
        query = as_array(torch.zeros(1, 1, 1, dtype=dtype))
        attention_kernels.compile_heads_ahead(query, as_array(pool.rows))

    def decode_rows(self, rows: Seq[ForwardRow], pool: KvPool) -> DecodeRows | None:
        return DecodeRows.of(rows, pool)

    def fused_decode(self, model: PlainModel, pool: KvPool, dtype: torch.dtype) -> FusedDecode | None:
        return FusedDecode.create(model, pool, dtype, torch.get_num_threads())

    def add_rms_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: np.ndarray,
        eps: np.float32,
        out: torch.Tensor,
    ) -> None:
        if delta is None:
            layer_kernels.rms_norm(x.numpy(), weight, eps, as_array(out))
        else:
            layer_kernels.add_rms_norm(x.numpy(), as_array(delta), weight, eps, as_array(out))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        activated = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
        layer_kernels.silu_mul(as_array(gate_up), as_array(activated), 0, activated.shape[1])
        return activated

    def rotate_and_store(
        self, qkv: torch.Tensor, layout: StepLayout, index: int, layer: PlainLayer, model: PlainModel
    ) -> torch.Tensor:
        pool = layout.pool
        query = qkv.new_empty((len(qkv), model.num_heads, pool.kv.shape[-1]))
        layer_kernels.rotate_and_store(
            as_array(qkv),
            layout.position_array,
            layout.place_array,
            model.cos,
            model.sin,
            layer.q_norm,
            layer.k_norm,
            model.eps,
            as_array(pool.rows),
            pool.key_row(index),
            pool.value_row(index),
            as_array(query),
        )
        return query

    def weighted_sum(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty((len(places), rows.shape[1]))
        layer_kernels.weighted_sum(as_array(rows), places.numpy(), weights.numpy(), as_array(out))
        return out
