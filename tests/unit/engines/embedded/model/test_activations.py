"""Activations give a number the same bits wherever it stands, on any number of threads, and torch's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch.nn import functional

from trtllm_disagg.engines.embedded.model.layer_ops import LayerOps, gelu_tanh, silu

Activation = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[1, 3, 7])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("width", [352, 2304])
@pytest.mark.parametrize("activation", [silu, gelu_tanh, LayerOps().silu_mul])
def test_a_row_has_the_same_bits_alone_and_among_others(activation: Activation, width: int) -> None:
    x = 4 * torch.randn((333, width), generator=torch.Generator().manual_seed(0))
    assert torch.equal(activation(x), torch.cat([activation(row[None]) for row in x]))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("activation", "of_torch"), [(silu, functional.silu), (gelu_tanh, partial(functional.gelu, approximate="tanh"))]
)  # fmt: skip
def test_values_are_those_of_torch_from_end_to_end(activation: Activation, of_torch: Activation) -> None:
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-1e4, -200.0, -0.0, 200.0, 1e4])])
    torch.testing.assert_close(activation(x), of_torch(x), atol=1e-6, rtol=1e-6)
