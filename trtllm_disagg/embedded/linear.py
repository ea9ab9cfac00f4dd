"""nn.Linear with a oneDNN-prepacked weight: faster on the CPU, and in float32 independent of the batch.

torch's own float32 linear gives a row other bits when other rows join it; the prepacked one does not, for any
number of rows from two on (facts: engine.md section 1b). One row is therefore computed as two.
"""

from __future__ import annotations

import torch
from torch import nn

_HINT_ROWS = 8


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Model code looks at weight.dtype.
        self.weight = linear.weight
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach().contiguous(), _HINT_ROWS
        )
        self._pad_single_row = linear.weight.dtype == torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:  # a step in which no row samples
            return x.new_empty(*x.shape[:-1], self.out_features)
        padded = self._pad_single_row and rows.shape[0] == 1
        if padded:
            rows = rows.expand(2, -1).contiguous()
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        if padded:
            y = y[:1]
        return y.view(*x.shape[:-1], self.out_features)


def packed(module: nn.Module) -> nn.Module:
    """A plain nn.Linear, or a layer made of some, with its weights packed."""
    if type(module) is nn.Linear:
        return PackedLinear(module)
    pack_linears(module)
    return module


def packing_works() -> bool:
    """The operators are private to torch, so they are tried before they are relied upon."""
    try:
        linear = nn.Linear(16, 16)
        x = torch.randn(3, 16)
        with torch.inference_mode():
            return torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)
    except (AttributeError, RuntimeError):
        return False


def pack_linears(module: nn.Module) -> None:
    """Replace every plain nn.Linear below `module`."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
