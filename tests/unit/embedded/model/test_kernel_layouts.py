"""A kernel of torch may leave its result in memory as it likes: some on CUDA put the heads behind the queries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trtllm_disagg.embedded.kv_cache.pool import KvPool
from trtllm_disagg.embedded.model.attention import LayerAttention, StepLayout
from trtllm_disagg.embedded.model.rows import ForwardRow

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 8, 16


class HeadsBehindQueries(LayerAttention):
    def kernel(self) -> Callable[..., torch.Tensor]:
        attend = super().kernel()
        return lambda *args, **kwargs: attend(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("num_tokens", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_is_the_same_wherever_the_kernel_leaves_the_heads(
    softcap: float | None, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    pool = KvPool(torch.randn((4, 1, 2, SIZE, KV_HEADS, DIM), generator=generator))
    in_prefill = num_tokens > 1
    row = ForwardRow([7] * num_tokens, 0 if in_prefill else 40, [2, 0, 3], in_prefill, 1)
    query = torch.randn((num_tokens, HEADS, DIM), generator=generator)
    usual, other = (
        StepLayout([row], pool).attend_stored(how(0, 0.5, None, softcap), query)
        for how in (LayerAttention, HeadsBehindQueries)
    )
    assert other.equal(usual)
