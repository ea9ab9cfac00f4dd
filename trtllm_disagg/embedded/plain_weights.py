"""A plain decoder's weights straight from its safetensors files.

transformers' own loader is right for every model, and imports a thousand modules first: 80 MB and over a second of
every engine's start, for a model that is taken apart at once. What does not look as expected here is left to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from trtllm_disagg.embedded.checkpoint import weight_places
from trtllm_disagg.embedded.weight_names import EMBEDDING, HEAD, Shape, expected_weights

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_plain(directory: Path, config: Any, dtype: torch.dtype) -> nn.Module | None:
    """A tree of modules with the names that transformers' model has: matrices are nn.Linear, the rest holds its
    weight. Numbers that are of `dtype` already stay in the mapped file until they are copied.

    None unless the files hold every expected weight, in its expected shape and unquantised.
    """
    places, expected = weight_places(directory), expected_weights(config)
    if getattr(config, "quantization_config", None) is not None or not places.keys() >= expected.keys():
        return None
    weights = {}
    for name, weight in _read(directory, places, expected):
        if weight.shape != expected[name] or weight.dtype not in _DTYPES:
            return None
        weights[name] = weight.to(dtype)
    if config.tie_word_embeddings:
        weights[f"{HEAD}.weight"] = weights[f"{EMBEDDING}.weight"]
    return _tree(weights, config)


def _read(
    directory: Path, places: dict[str, str], names: dict[str, Shape]
) -> Iterator[tuple[str, torch.Tensor]]:
    """One file after the other."""
    for file in sorted({places[name] for name in names}):
        with safe_open(directory / file, "pt") as tensors:
            for name in names:
                if places[name] == file:
                    yield name, tensors.get_tensor(name)


def _tree(weights: dict[str, torch.Tensor], config: Any) -> nn.Module:
    root = nn.Module()
    root.config = config
    for name, weight in weights.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight":
            is_matrix = weight.dim() == 2 and path != EMBEDDING
            bias = weights.get(f"{path}.bias")
            _place(root, path, _linear(weight, bias) if is_matrix else _holder(weight))
    return root


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for step in parents:
        if not hasattr(root, step):
            root.add_module(step, nn.ModuleList() if step == "layers" else nn.Module())
        root = root.get_submodule(step)
    root.add_module(name, module)


def _holder(weight: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
