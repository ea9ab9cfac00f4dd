"""Attention whose scores are bounded by a soft-cap (Gemma 2), which torch's own attention does not know."""

from __future__ import annotations

import torch


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
    """`scaled_dot_product_attention` with scores softcap * tanh(score / softcap).

    query (1, heads, queries, dim), key and value (1, kv heads, keys, dim), attn_mask (queries, keys), 0 where a
    query may look and else minus infinity -> (1, heads, queries, dim). Head h looks at KV head h // (heads / kv heads).
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
