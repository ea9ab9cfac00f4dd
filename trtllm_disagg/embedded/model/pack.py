"""Replacing the products of a tree of modules by others that compute the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

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
