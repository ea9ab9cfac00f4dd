"""`LayerOps` by compiled kernels (layer_kernels.py, attention_kernels.py), float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from trtllm_disagg.embedded.cpu_kernels import attention_kernels, layer_kernels
from trtllm_disagg.embedded.cpu_kernels.views import as_array
from trtllm_disagg.embedded.kv_cache.memory import KvPool
from trtllm_disagg.embedded.model.attention import StepLayout
from trtllm_disagg.embedded.model.decode_rows import DecodeRows
from trtllm_disagg.embedded.model.fused_decode import FusedDecode
from trtllm_disagg.embedded.model.plain_model import PlainLayer, PlainModel
from trtllm_disagg.embedded.model.row import ForwardRow


class CompiledOps:
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
