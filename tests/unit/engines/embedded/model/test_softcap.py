"""Attention with a soft-cap is transformers' eager attention of Gemma 2, in torch and in the decode kernel."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trtllm_disagg.engines.embedded.cpu_kernels import decode_attention
from trtllm_disagg.engines.embedded.cpu_kernels.layer_kernels import as_array
from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.model.layers import capped_attention

HEADS, KV_HEADS, DIM, KEYS, SIZE = 6, 2, 16, 45, 15
SCALE, CAP = 0.7, 3.0


def inputs(num_queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_queries)
    shapes = (1, HEADS, num_queries, DIM), (1, KV_HEADS, KEYS, DIM), (1, KV_HEADS, KEYS, DIM)
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query * 2, key, value


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False)
    out: torch.Tensor = eager_attention_forward(module, query, key, value, mask, scaling=SCALE, softcap=CAP)[
        0
    ].transpose(1, 2)
    return out


@pytest.mark.parametrize("masked", [True, False])
def test_capped_attention_of_many_queries_is_that_of_the_formula(masked: bool) -> None:
    query, key, value = inputs(9)
    hidden = torch.arange(KEYS)[None] > torch.arange(36, 45)[:, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf) if masked else None
    made = capped_attention(CAP, query, key, value, attn_mask=mask, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(made, expected(query, key, value, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [CAP, 0.0])
def test_the_decode_kernel_caps_the_logits_of_one_query(cap: float) -> None:
    query, key, value = inputs(1)
    out = torch.empty(1, HEADS, DIM)
    kv = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)))
    pool = KvPool(kv.view(2, KEYS // SIZE, SIZE, KV_HEADS, DIM).transpose(0, 1)[:, None].contiguous())
    decode_attention.attend_rows(
        as_array(query[:, :, 0]),
        as_array(pool.rows),
        pool.key_row(0),
        SIZE,
        np.arange(KEYS // SIZE)[None] * pool.rows_per_block,
        np.array([KEYS]),
        np.array([0]),
        np.float32(SCALE),
        np.float32(cap),
        np.empty((HEADS, KEYS), np.float32),
        as_array(out),
    )
    wanted = (
        expected(query, key, value, None)
        if cap
        else torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=SCALE, enable_gqa=True)
    )
    torch.testing.assert_close(out[None].transpose(1, 2), wanted, atol=1e-5, rtol=1e-5)
