"""Activations in float32 with bits that depend on the number alone, and not on its place in a tensor.

torch's own silu and gelu compute what is left of a vector, at the end of each thread's part, with other last bits. With
a number of threads that is no power of two such an end is in the middle of a row, and where depends on how many rows
there are. exp and tanh have the same bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def silu(x: torch.Tensor) -> torch.Tensor:
    if not _depends_on_place(x):
        return functional.silu(x)
    return x / torch.exp(-x).add_(1)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh."""
    if not _depends_on_place(x):
        return functional.gelu(x, approximate="tanh")
    inner = (x + _GELU_CUBE * x * x * x) * _GELU_SCALE
    return x * 0.5 * torch.tanh(inner).add_(1)


def _depends_on_place(x: torch.Tensor) -> bool:
    """Whether torch's own, which are faster, would give other bits."""
    threads = torch.get_num_threads()
    return threads & (threads - 1) != 0 and x.dtype is torch.float32 and x.device.type == "cpu"


class _Activation(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def replace_activations(module: nn.Module) -> None:
    """In place of transformers' SiLU and GELU below `module`."""
    from transformers.activations import GELUTanh, SiLUActivation

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (SiLUActivation, nn.SiLU)):
                setattr(parent, name, _Activation(silu))
            elif isinstance(child, GELUTanh):
                setattr(parent, name, _Activation(gelu_tanh))
