"""Replacing the products of a tree of modules by others that compute the same, by torch alone or by linear.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

#: Rows at a time.
TILE = 16
#: Weights that are float32 at a time, where they are kept as bfloat16: they stay in a cache.
_WIDENED = 1 << 18
#: How a product is computed here. It has `in_features` and `out_features`.
Pack = Callable[[nn.Linear], nn.Module]


def packed(module: nn.Module, pack: Pack) -> nn.Module:
    """A plain nn.Linear, or a layer made of some, with its weights packed."""
    if type(module) is nn.Linear:
        return pack(module)
    pack_linears(module, pack)
    return module


def pack_linears(module: nn.Module, pack: Pack) -> None:
    """Replace every plain nn.Linear below `module`."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, pack(child))
        else:
            pack_linears(child, pack)


def convert_rest(module: nn.Module, dtype: torch.dtype) -> None:
    """What has not been packed becomes `dtype`, and a copy, so that the checkpoint file that it is mapped from can
    go.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype, copy=True)


def linear_over(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """(outputs, inputs), (outputs,): an nn.Linear with just these tensors, which are not copied."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


class TiledLinear(nn.Module):
    """By torch's own matrix product, in float32, from and to float32, and still independent of the batch.

    torch gives a row other bits when other rows join it, because another kernel runs for another number of rows. So
    rows are multiplied so many at a time, always, padded with zeros; that a row's bits do not depend on its place among
    them is proven by trying, and where they do, rows are multiplied one by one.

    Weights may stay bfloat16, half as large: then some outputs' weights at a time become float32 beside the product.
    """

    def __init__(self, linear: nn.Linear, kept: torch.dtype = torch.float32) -> None:
        """`kept` is the dtype that the weights are held in."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Model code looks at weight.dtype.
        self.weight = linear.weight.detach().to("meta", torch.float32)
        self.bias_values = None if linear.bias is None else linear.bias.detach().to(torch.float32, copy=True)
        self._kept = linear.weight.detach().to(kept, copy=True).contiguous()
        # Whole, or a number of outputs that depends on the weight's shape alone.
        self._outputs = self.out_features if kept == torch.float32 else max(1, _WIDENED // self.in_features)
        self._rows = TILE if self._place_does_not_matter() else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        made = self._product(rows, self._rows)
        if self.bias_values is not None:
            made += self.bias_values
        return made.view(*x.shape[:-1], self.out_features)

    def _product(self, rows: torch.Tensor, at_a_time: int) -> torch.Tensor:
        count = len(rows)
        padding = -count % at_a_time
        padded = nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows.contiguous()
        made = torch.empty((len(padded), self.out_features))
        for first in range(0, self.out_features, self._outputs):
            weights = self._kept[first : first + self._outputs].float().t()
            for row in range(0, len(padded), at_a_time):
                part = made[row : row + at_a_time, first : first + self._outputs]
                part.copy_(padded[row : row + at_a_time] @ weights)
        return made[:count]

    @torch.inference_mode()
    def _place_does_not_matter(self) -> bool:
        """The same row in every place."""
        row = torch.randn((1, self.in_features), generator=torch.Generator().manual_seed(0))
        made = self._product(row.repeat(TILE, 1), TILE)
        return torch.equal(made, made[:1].expand_as(made))
