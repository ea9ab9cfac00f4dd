"""What attention must not depend on: how a kernel of torch leaves its result in memory (some on CUDA put the heads
behind the queries), and what the pool has behind a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.model.attention import StepLayout
from trtllm_disagg.engines.embedded.model.layers import LayerAttention
from trtllm_disagg.engines.embedded.model.rows import ForwardRow

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


@pytest.mark.parametrize("size", [8, 16, 32, 64], ids="blocks of {}".format)
@pytest.mark.parametrize("context", [20, 33, 64, 75])
def test_what_the_pool_has_behind_a_sequence_does_not_count(context: int, size: int) -> None:
    """In blocks that end before a tile does, with it, and behind it."""
    generator = torch.Generator().manual_seed(context)
    kv = torch.randn((16, 1, 2, size, KV_HEADS, DIM), generator=generator)
    blocks = list(range(15, 15 - -(-context // size), -1))
    used = context - (len(blocks) - 1) * size
    query = torch.randn((context - 8, HEADS, DIM), generator=generator)
    answers = []
    for behind in (0.0, torch.inf, torch.nan):
        kv[blocks[-1], :, :, used:] = behind
        pool = KvPool(kv.clone())
        row = ForwardRow([7] * (context - 8), 8, blocks, True, 1)
        answers.append(StepLayout([row], pool).attend_stored(LayerAttention(0, 0.5), query))
        assert pool.kv.isfinite().equal(kv.isfinite()), "the pool itself stays as it is"
    assert answers[0].isfinite().all()
    assert answers[1].equal(answers[0])
    assert answers[2].equal(answers[0])


@pytest.mark.skipif(not this_cpu().compiles, reason="no kernels are compiled at this CPU level")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_key_that_is_no_finite_number_shows_in_the_answer_of_a_decode_row(number: float) -> None:
    from trtllm_disagg.engines.embedded.model.compiled_ops import DecodeRows

    generator = torch.Generator().manual_seed(1)
    kv = torch.randn((3, 1, 2, SIZE, KV_HEADS, DIM), generator=generator)
    query = torch.randn((1, HEADS, DIM), generator=generator).abs()
    row = ForwardRow([7], 40, [2, 0, 1], False, 1)
    kv[0, 0, 0, 5, 1, 3] = number
    layout = StepLayout([row], KvPool(kv), DecodeRows([row], KvPool(kv)))
    made = layout.attend_stored(LayerAttention(0, 0.5), query)
    assert made[0].isfinite().all(-1).tolist() == [True, True, False, False]
