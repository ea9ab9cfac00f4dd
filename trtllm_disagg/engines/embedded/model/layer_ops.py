"""The operations between a layer's products, in torch; compiled_ops.py has them as compiled kernels.

forward.py and the experts of pack.py share this interface. Each row's numbers depend on that row only. Shapes: R rows,
n hidden, D of a head, Hq query and H KV heads; norms' weights are float32 arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trtllm_disagg.common.reports import Reporter
from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.model.attention import KernelRows, StepLayout
from trtllm_disagg.engines.embedded.model.layers import PlainLayer, PlainModel
from trtllm_disagg.engines.embedded.model.rows import ForwardRow


class DecodeStep(Protocol):
    """A step of decode rows only, as one call, by one thread."""

    max_rows: int

    def __call__(self, tokens: Seq[int], layout: StepLayout) -> torch.Tensor:
        """Logits (sampling rows, vocabulary) float32, valid until the next step."""

    def close(self) -> None: ...


class LayerOps:
    """Operations from and to float32."""

    def reporting_compilation(self, reporter: Reporter) -> AbstractContextManager[None]:
        """A context that reports the kernels it compiles."""
        return nullcontext()

    def prepare(self, pool: KvPool, dtype: torch.dtype) -> None:
        """Called before the weights are read."""

    def decode_rows(self, rows: Seq[ForwardRow], pool: KvPool) -> KernelRows | None:
        """A step's leading rows that one kernel serves; None without such rows or a kernel."""
        return None

    def prefill_rows(self, rows: Seq[ForwardRow], pool: KvPool) -> KernelRows | None:
        """A step's rows in prefill that one kernel serves; None without such rows or a kernel."""
        return None

    def fused_decode(self, model: PlainModel, pool: KvPool, dtype: torch.dtype) -> DecodeStep | None:
        """A step of decode rows only as one call; None if it takes many."""
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
        """(R, (Hq + 2 H) * D) -> queries (R, Hq, D), rotated, and normalised if the layer does so. Stores K (likewise)
        and V in the layout's pool, for layer `index`.
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
        """rows (m, n), their indices places (R, k), weights (R, k) float32 -> (R, n), summed in the order of k."""
        total = torch.zeros((len(places), rows.shape[1]))
        for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
            total += rows[place] * weight[:, None]
        return total.to(rows.dtype)


def _normalised(x: torch.Tensor, weight: np.ndarray, eps: np.float32) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(eps)) * torch.from_numpy(weight)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of the two halves of D; cos and sin (R, 1, D / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# float32 activations with bits that depend only on the number. torch's silu and gelu differ in the last bits at the end
# of a thread's part that is no whole vector; unless the number of threads is a power of two, that end is within a row.
# exp and tanh have the same bits everywhere.

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
    """True if torch's faster activations would give other bits."""
    threads = torch.get_num_threads()
    return threads & (threads - 1) != 0 and x.dtype is torch.float32 and x.device.type == "cpu"


class _Activation(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def replace_activations(module: nn.Module) -> None:
    """Replace transformers' SiLU and GELU below `module`."""
    from transformers.activations import GELUTanh, SiLUActivation

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (SiLUActivation, nn.SiLU)):
                setattr(parent, name, _Activation(silu))
            elif isinstance(child, GELUTanh):
                setattr(parent, name, _Activation(gelu_tanh))
