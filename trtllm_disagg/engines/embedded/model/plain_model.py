"""A plain decoder's weights: read into a tree of modules, taken out of it, packed, the originals let go.

transformers' own loader is right for every model, and imports a thousand modules first: 80 MB and over a second of
every engine's start, for a model that is taken apart at once. So `read_plain` reads the safetensors files itself; what
does not look as expected there is left to transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from trtllm_disagg.engines.embedded.model.attention import LayerAttention
from trtllm_disagg.engines.embedded.model.pack import Pack, linear_over, packed
from trtllm_disagg.engines.embedded.params.model_config import (
    EMBEDDING,
    HEAD,
    ModelConfig,
    Shape,
    expected_weights,
    weight_places,
)
from trtllm_disagg.processes.reports import LOADING, Reporter

_NO_NORM = np.empty(0, np.float32)


def supports(config: ModelConfig) -> bool:
    """Whether the plain forward can run this model, in place of transformers' modules."""
    return config.is_plain_family and config.hidden_act == "silu" and config.has_static_rope


@dataclass(frozen=True, slots=True)
class PlainLayer:
    input_norm: np.ndarray
    qkv: nn.Module
    q_norm: np.ndarray
    k_norm: np.ndarray
    #: One product, or with tensor parallelism one of all ranks together.
    output: nn.Module
    post_norm: np.ndarray
    gate_up: nn.Module
    down: nn.Module
    attention: LayerAttention


@dataclass(frozen=True, slots=True)
class PlainModel:
    #: (vocabulary, n), in the dtype of the checkpoint as it was read
    embedding: torch.Tensor
    layers: list[PlainLayer]
    final_norm: np.ndarray
    head: nn.Module
    num_heads: int
    eps: np.float32
    #: (positions, dim / 2) float32
    cos: np.ndarray
    sin: np.ndarray


def take_apart(
    model: Any,
    config: ModelConfig,
    max_positions: int,
    kv_heads: int,
    pack: Pack,
    reporter: Reporter | None = None,
) -> PlainModel:
    """`model` is transformers' or `read_plain`'s; it cannot be used afterwards. `kv_heads` are this rank's."""
    reporter = reporter or Reporter()
    decoder, head_dim = model.model, config.head_dim
    cos, sin = rope_tables(config, max_positions, head_dim)
    layers: list[PlainLayer] = []
    for i in range(len(decoder.layers)):
        # Weights that stayed in their mapped file are read here.
        reporter.tell(LOADING, percent=100 * i // len(decoder.layers))
        how = LayerAttention(i, head_dim**-0.5, _window(config, i))
        layers.append(_take(decoder.layers[i], how, pack))
        # At no time are there two copies of more than one layer.
        decoder.layers[i] = nn.Identity()
    return PlainModel(
        # Copies, here and of the norms: one number that stays in the mapped file keeps all of it in memory.
        embedding=decoder.embed_tokens.weight.detach().clone(),
        layers=layers,
        final_norm=_weights(decoder.norm),
        head=packed(model.lm_head, pack),
        num_heads=config.num_attention_heads * kv_heads // config.num_key_value_heads,
        eps=np.float32(config.rms_norm_eps),
        cos=cos,
        sin=sin,
    )


def rope_tables(config: ModelConfig, count: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of rotary positions, as transformers computes them: (positions, dim / 2) float32 each, for
    `count` positions; the rotation's second half has the same ones.
    """
    frequencies, scaling = _frequencies(config, dim)
    angles = torch.arange(count)[:, None].float() * frequencies.float()
    return (angles.cos() * scaling).numpy(), (angles.sin() * scaling).numpy()


def _frequencies(config: ModelConfig, dim: int) -> tuple[torch.Tensor, float]:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0
    # Here, as it brings the rest of transformers along.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config.source)
    return frequencies, float(scaling)


def _take(layer: Any, how: LayerAttention, pack: Pack) -> PlainLayer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return PlainLayer(
        input_norm=_weights(layer.input_layernorm),
        qkv=_joined((attention.q_proj, attention.k_proj, attention.v_proj), pack),
        q_norm=_weights(attention.q_norm) if has_norms else _NO_NORM,
        k_norm=_weights(attention.k_norm) if has_norms else _NO_NORM,
        output=packed(attention.o_proj, pack),
        post_norm=_weights(layer.post_attention_layernorm),
        gate_up=_joined((mlp.gate_proj, mlp.up_proj), pack),
        down=packed(mlp.down_proj, pack),
        attention=how,
    )


def _window(config: ModelConfig, layer: int) -> int | None:
    """Mistral has one window for all layers, the Qwens for some, Llama none."""
    match config.model_type:
        case "mistral":
            return config.sliding_window
        case "qwen2" | "qwen3" if config.layer_types[layer] == "sliding_attention":
            return config.sliding_window
        case _:
            return None


def _joined(linears: Iterable[nn.Linear], pack: Pack) -> nn.Module:
    """Several products with the same input as one."""
    parts = list(linears)
    biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
    weight = torch.cat([part.weight.detach() for part in parts])
    return pack(linear_over(weight, torch.cat(biases) if biases else None))


def _weights(norm: nn.Module) -> np.ndarray:
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach().to(torch.float32, copy=True).numpy()


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_plain(directory: Path, config: ModelConfig, dtype: torch.dtype) -> nn.Module | None:
    """A tree of modules with the names that transformers' model has: matrices are nn.Linear, the rest holds its
    weight. Numbers that are of `dtype` already stay in the mapped file until they are copied.

    None unless the files hold every expected weight, in its expected shape and a plain dtype.
    """
    places, expected = weight_places(directory), expected_weights(config)
    if not places.keys() >= expected.keys():
        return None
    weights = {}
    for name, weight in _read(directory, places, expected):
        if weight.shape != expected[name] or weight.dtype not in _DTYPES:
            return None
        weights[name] = weight.to(dtype)
    if config.tie_word_embeddings:
        weights[f"{HEAD}.weight"] = weights[f"{EMBEDDING}.weight"]
    return _tree(weights)


def _read(
    directory: Path, places: dict[str, str], names: dict[str, Shape]
) -> Iterator[tuple[str, torch.Tensor]]:
    """One file after the other."""
    for file in sorted({places[name] for name in names}):
        with safe_open(directory / file, "pt") as tensors:
            for name in names:
                if places[name] == file:
                    yield name, tensors.get_tensor(name)


def _tree(weights: dict[str, torch.Tensor]) -> nn.Module:
    root = nn.Module()
    for name, weight in weights.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight":
            is_matrix = weight.dim() == 2 and path != EMBEDDING
            bias = weights.get(f"{path}.bias")
            _place(root, path, linear_over(weight, bias) if is_matrix else _holder(weight))
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
