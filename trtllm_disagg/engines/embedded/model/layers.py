"""The layers of a plain decoder: their weights, and how each attends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention settings of one layer."""

    layer: int
    scale: float
    #: Number of positions that a query attends to, its own included; None: all before it.
    window: int | None = None
    #: Bound of the scores, if any.
    softcap: float | None = None

    def kernel(self) -> Callable[..., torch.Tensor]:
        if self.softcap is None:
            return partial(scaled_dot_product_attention, scale=self.scale)
        return partial(capped_attention, self.softcap, scale=self.scale)


@dataclass(frozen=True, slots=True)
class PlainLayer:
    input_norm: np.ndarray
    qkv: nn.Module
    q_norm: np.ndarray
    k_norm: np.ndarray
    #: One product; with tensor parallelism, of all ranks together.
    output: nn.Module
    post_norm: np.ndarray
    gate_up: nn.Module
    down: nn.Module
    attention: LayerAttention


@dataclass(frozen=True, slots=True)
class PlainModel:
    #: (vocabulary, n), in the checkpoint's dtype as read
    embedding: torch.Tensor
    layers: list[PlainLayer]
    final_norm: np.ndarray
    head: nn.Module
    num_heads: int
    eps: np.float32
    #: (positions, dim / 2) float32
    cos: np.ndarray
    sin: np.ndarray


def capped_attention(
    softcap: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    scale: float,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with scores bounded by a soft-cap (Gemma 2): softcap * tanh(score / softcap).

    query (1, heads, queries, dim), key and value (1, kv heads, keys, dim), attn_mask (queries, keys) of 0 or minus
    infinity -> (1, heads, queries, dim). Head h attends to KV head h // (heads / kv heads).
    """
    _, num_heads, num_queries, dim = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.reshape(kv_heads, -1, dim)
    scores = (grouped @ key[0].transpose(1, 2)).float() * (scale / softcap)
    scores = scores.tanh_().mul_(softcap).view(num_heads, num_queries, num_keys)
    if attn_mask is not None:
        scores += attn_mask
    weights = scores.softmax(-1).to(value.dtype).view(kv_heads, -1, num_keys)
    return (weights @ value[0]).view(1, num_heads, num_queries, dim)
