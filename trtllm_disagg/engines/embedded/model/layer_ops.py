"""What lies between the products of a layer, by torch alone; compiled_ops.py has it as compiled kernels.

A forward (forward.py) and a mixture of experts (pack.py) call it by one interface. Each row's numbers depend
on that row only. Shapes: R rows, n hidden, D of a head, Hq query and H KV heads; norms' weights are float32 arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.model.attention import StepLayout
from trtllm_disagg.engines.embedded.model.rows import ForwardRow
from trtllm_disagg.processes.reports import Reporter

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.model.compiled_ops import DecodeRows, FusedDecode, PrefillRows
    from trtllm_disagg.engines.embedded.model.plain_model import PlainLayer, PlainModel


class LayerOps:
    """From and to float32."""

    def reporting_compilation(self, reporter: Reporter) -> AbstractContextManager[None]:
        """Inside it the reporter tells of kernels that are compiled."""
        return nullcontext()

    def prepare(self, pool: KvPool, dtype: torch.dtype) -> None:
        """Called before the weights are read."""

    def decode_rows(self, rows: Seq[ForwardRow], pool: KvPool) -> DecodeRows | None:
        """A step's leading rows that one kernel serves; None where there are none, or no kernel."""
        return None

    def prefill_rows(self, rows: Seq[ForwardRow], pool: KvPool) -> PrefillRows | None:
        """A step's rows in prefill, if one kernel serves them; None where there are none, or no kernel."""
        return None

    def fused_decode(self, model: PlainModel, pool: KvPool, dtype: torch.dtype) -> FusedDecode | None:
        """A step in which every row decodes, as one call; None where a step is many calls."""
        return None

    def add_rms_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: np.ndarray,
        eps: np.float32,
        out: torch.Tensor,
    ) -> None:
        """x (R, n) float32 += delta; out = x / rms(x) * weight."""
        if delta is not None:
            x += delta
        out.copy_(_normalised(x, weight, eps))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(R, 2 n) -> (R, n): silu of the first half times the second."""
        gate, up = gate_up.chunk(2, dim=1)
        return silu(gate) * up

    def rotate_and_store(
        self, qkv: torch.Tensor, layout: StepLayout, index: int, layer: PlainLayer, model: PlainModel
    ) -> torch.Tensor:
        """(R, (Hq + 2 H) * D) -> queries (R, Hq, D), normalised where the layer does so, and rotated; K, likewise, and
        V go into the layout's pool, for layer `index`.
        """
        pool = layout.pool
        kv_heads, dim = pool.kv.shape[-2:]
        heads = qkv.view(len(qkv), -1, dim)
        query, key, value = heads.tensor_split((model.num_heads, model.num_heads + kv_heads), dim=1)
        if len(layer.q_norm):
            query = _normalised(query, layer.q_norm, model.eps)
            key = _normalised(key, layer.k_norm, model.eps)
        cos, sin = (torch.from_numpy(t[layout.position_array])[:, None] for t in (model.cos, model.sin))
        for numbers, row in ((_rotated(key, cos, sin), pool.key_row(index)), (value, pool.value_row(index))):
            pool.rows.index_copy_(0, layout.places + row, numbers.to(pool.kv.dtype))
        return _rotated(query, cos, sin)

    def weighted_sum(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """rows (m, n), places (R, k) among them, weights (R, k) float32 -> (R, n), summed in the order of k."""
        total = torch.zeros((len(places), rows.shape[1]))
        for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
            total += rows[place] * weight[:, None]
        return total.to(rows.dtype)


def _normalised(x: torch.Tensor, weight: np.ndarray, eps: np.float32) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(eps)) * torch.from_numpy(weight)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The two halves of D are each other's partners; cos and sin (R, 1, D / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# Activations in float32 with bits that depend on the number alone, and not on its place in a tensor. torch's own silu
# and gelu compute the end of each thread's part, where it is no whole vector, with other last bits. With a number of
# threads that is no power of two such an end is in the middle of a row. exp and tanh have the same bits everywhere.

_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def silu(x: torch.Tensor) -> torch.Tensor:
    if not _depends_on_place(x):
        return functional.silu(x)
    return x / torch.exp(-x).add_(1)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh."""
    if not _depends_on_place(x):
        return functional.gelu(x, approximate="tanh")
    inner = (x + _GELU_CUBE * x * x * x) * _GELU_SCALE
    return x * 0.5 * torch.tanh(inner).add_(1)


def _depends_on_place(x: torch.Tensor) -> bool:
    """Whether torch's own, which are faster, would give other bits."""
    threads = torch.get_num_threads()
    return threads & (threads - 1) != 0 and x.dtype is torch.float32 and x.device.type == "cpu"


class _Activation(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def replace_activations(module: nn.Module) -> None:
    """In place of transformers' SiLU and GELU below `module`."""
    from transformers.activations import GELUTanh, SiLUActivation

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (SiLUActivation, nn.SiLU)):
                setattr(parent, name, _Activation(silu))
            elif isinstance(child, GELUTanh):
                setattr(parent, name, _Activation(gelu_tanh))
