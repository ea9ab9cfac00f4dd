"""A prepacked linear computes what nn.Linear does, and in float32 the same bits for a row in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trtllm_disagg.engines.embedded.cpu_kernels import parallel
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.model.linear import MAX_ROWS, PackedLinear, packing_works
from trtllm_disagg.engines.embedded.model.pack import pack_linears

SHAPES = [(64, 192), (192, 64), (64, 258), (100, 17)]


def make(k: int, n: int, dtype: torch.dtype = torch.float32, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(k * n)
    return nn.Linear(k, n, bias=bias).to(dtype).requires_grad_(False)


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def test_packing_works_with_the_pinned_torch() -> None:
    assert packing_works()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_computes_what_linear_computes(shape: tuple[int, int], bias: bool) -> None:
    linear = make(*shape, bias=bias)
    x = torch.randn(3, 5, shape[0])
    y = PackedLinear(linear)(x)
    assert y.shape == (3, 5, shape[1])
    torch.testing.assert_close(y, linear(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(512, 1024), (1536, 512), (2048, 130), *SHAPES], ids=str)
def test_many_rows_have_the_librarys_bits(shape: tuple[int, int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    packed = PackedLinear(make(*shape, bias=True))
    x = torch.randn(300, shape[0])
    assert torch.equal(packed(x), packed.by_library(x))
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_are_the_librarys_where_it_alone_has_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "GOMP_PARALLEL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    packed = PackedLinear(make(64, 192))
    monkeypatch.setattr(packed, "by_library", lambda rows: rows.new_zeros(len(rows), 192))
    by_library = not packed(torch.ones(MAX_ROWS + 1, 64)).any()
    assert by_library == (threads == 2 or this_cpu().level != "avx2")
    torch.set_num_threads(before)


def test_no_rows_give_no_rows() -> None:
    assert PackedLinear(make(64, 192))(torch.empty(1, 0, 64)).shape == (1, 0, 192)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_weights_in_float32_give_the_bits_of_those_weights_as_float32(
    shape: tuple[int, int], bias: bool
) -> None:
    linear = make(*shape, torch.bfloat16, bias=bias)
    x = torch.randn(5, shape[0])
    made = PackedLinear(linear, torch.float32)(x)
    assert made.dtype == torch.float32
    assert torch.equal(made, PackedLinear(linear.float())(x))


@pytest.mark.skipif(not this_cpu().has_bfloat16, reason="this CPU level has no bfloat16 products")
def test_bfloat16_stays_bfloat16_and_close() -> None:
    linear = make(64, 192, torch.bfloat16, bias=True)
    x = torch.randn(7, 64).to(torch.bfloat16)
    y = PackedLinear(linear)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, linear(x), atol=0.02, rtol=0.02)


def test_every_plain_linear_is_replaced_wherever_it_is() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(16, 16), nn.ModuleDict({"a": nn.Linear(16, 16), "b": Special(16, 16)}))
    pack_linears(model, PackedLinear)
    kinds = [type(module) for module in model.modules() if isinstance(module, (nn.Linear, PackedLinear))]
    assert kinds == [PackedLinear, PackedLinear, Special]
