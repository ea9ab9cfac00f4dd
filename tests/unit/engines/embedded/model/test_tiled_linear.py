"""A linear of torch's own products computes what nn.Linear does, and a row's bits are its own in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from trtllm_disagg.engines.embedded.model.pack import ROWS_AT_A_TIME, TiledLinear

SHAPES = [(64, 192), (192, 64), (64, 258), (100, 17), (512, 1536), (3, 2)]


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def make(k: int, n: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    torch.manual_seed(k * n)
    return nn.Linear(k, n, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_computes_what_linear_computes(shape: tuple[int, int], kept: torch.dtype, bias: bool) -> None:
    linear = make(*shape, kept, bias)
    x = torch.randn(3, 5, shape[0])
    y = TiledLinear(linear, kept)(x)
    assert y.shape == (3, 5, shape[1])
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, linear.float()(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(shape: tuple[int, int], kept: torch.dtype) -> None:
    tiled = TiledLinear(make(*shape, kept), kept)
    x = torch.randn(5 * ROWS_AT_A_TIME + 3, shape[0])
    alone = torch.cat([tiled(row[None]) for row in x])
    for count in (2, 3, 9, ROWS_AT_A_TIME, ROWS_AT_A_TIME + 1, len(x)):
        assert torch.equal(tiled(x[:count]), alone[:count]), count
        assert torch.equal(tiled(x[-count:]), alone[-count:]), count


def test_no_rows_give_no_rows() -> None:
    assert TiledLinear(make(64, 192, torch.float32))(torch.empty(1, 0, 64)).shape == (1, 0, 192)
