"""Packed mixtures compute what transformers' do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.model.layer_ops import LayerOps
from trtllm_disagg.engines.embedded.model.pack import (
    Pack,
    PackedExperts,
    PackedRouter,
    TiledLinear,
    pack_experts,
)

HIDDEN, NUM_EXPERTS = 64, 8


def mixture(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """transformers' own layer, with random weights."""
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    settings = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, "intermediate_size": 192} | more
    if family == "mixtral":
        layer: Any = MixtralSparseMoeBlock(MixtralConfig(num_local_experts=NUM_EXPERTS, **settings))
    else:
        config = Qwen3MoeConfig(num_experts=NUM_EXPERTS, moe_intermediate_size=128, **settings)
        layer = Qwen3MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(1)
    for weight in layer.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) / 8
    layer.experts.config._experts_implementation = "eager"
    return layer.to(dtype).eval().requires_grad_(False)


def library() -> tuple[Pack, LayerOps]:
    from trtllm_disagg.engines.embedded.model.compiled_ops import CompiledOps
    from trtllm_disagg.engines.embedded.model.linear import PackedLinear

    return PackedLinear, CompiledOps()


#: Products and what lies between them: with compiled kernels, and with torch alone.
ARITHMETIC = {"torch": lambda: (TiledLinear, LayerOps())} | (
    {"compiled": library} if this_cpu().compiles else {}
)


@pytest.fixture(params=list(ARITHMETIC))
def packed(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    def pack(layer: Any) -> Any:
        layer = copy.deepcopy(layer)
        pack_experts(layer, *ARITHMETIC[request.param]())
        assert (type(layer.gate), type(layer.experts)) == (PackedRouter, PackedExperts)
        return layer

    return pack


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize(
    ("family", "more"),
    [("qwen3_moe", {"norm_topk_prob": True}), ("qwen3_moe", {"norm_topk_prob": False}), ("mixtral", {})],
)
def test_it_computes_what_transformers_computes(
    packed: Callable[[Any], Any], family: str, more: dict[str, Any], num_tokens: int
) -> None:
    layer = mixture(family, **more)
    x = torch.randn(1, num_tokens, HIDDEN)
    torch.testing.assert_close(packed(layer)(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not this_cpu().has_bfloat16, reason="this CPU level has no bfloat16 products")
def test_bfloat16_stays_bfloat16_and_close() -> None:
    layer = mixture(dtype=torch.bfloat16)
    x = torch.randn(1, 20, HIDDEN).to(torch.bfloat16)
    mine = copy.deepcopy(layer)
    pack_experts(mine, *library())
    made = mine(x)
    assert made.dtype == torch.bfloat16
    # Rows with a tie at the last choice may choose otherwise; none of these is one.
    torch.testing.assert_close(made, layer(x), atol=0.05, rtol=0.05)


def test_no_tokens_give_no_tokens(packed: Callable[[Any], Any]) -> None:
    assert packed(mixture())(torch.empty(1, 0, HIDDEN)).shape == (1, 0, HIDDEN)
