"""A plain decoder's weights: read into a tree of modules, taken out of it, packed, and the originals released.

transformers' loader handles every model but costs each engine's start 80 MB and over a second of imports. So
`read_plain` reads the safetensors files itself, and leaves files with anything unexpected to transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from trtllm_disagg.common.reports import LOADING, Reporter
from trtllm_disagg.engines.embedded.model.layers import LayerAttention, PlainLayer, PlainModel
from trtllm_disagg.engines.embedded.model.pack import Pack, linear_over, packed
from trtllm_disagg.engines.embedded.params.model_config import (
    EMBEDDING,
    HEAD,
    ModelConfig,
    expected_weights,
    weight_places,
)
from trtllm_disagg.engines.embedded.params.vision_config import plain_name

_NO_NORM = np.empty(0, np.float32)


def supports(config: ModelConfig) -> bool:
    """True if the plain forward can run this model instead of transformers' modules."""
    return config.is_plain_family and config.hidden_act == "silu" and config.has_static_rope


def take_apart(
    model: Any,
    config: ModelConfig,
    max_positions: int,
    kv_heads: int,
    pack: Pack,
    reporter: Reporter | None = None,
) -> PlainModel:
    """Consumes `model`, of transformers or `read_plain`. `kv_heads`: this rank's."""
    reporter = reporter or Reporter()
    decoder, head_dim = model.model, config.head_dim
    cos, sin = rope_tables(config, max_positions, head_dim)
    layers: list[PlainLayer] = []
    for i in range(len(decoder.layers)):
        # Reads weights that are still in their mapped file.
        reporter.report(LOADING, percent=100 * i // len(decoder.layers))
        how = LayerAttention(i, head_dim**-0.5, _window(config, i))
        layers.append(_take(decoder.layers[i], how, pack))
        # Releases the layer, so that at most one layer has two copies.
        decoder.layers[i] = nn.Identity()
    return PlainModel(
        # A copy, as for the norms: a view would keep the whole mapped file in memory.
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
    """transformers' cosines and sines of `count` rotary positions: (positions, dim / 2) float32 each. The rotation's
    second half has the same ones.
    """
    frequencies, scaling = _frequencies(config, dim)
    angles = torch.arange(count)[:, None].float() * frequencies.float()
    return (angles.cos() * scaling).numpy(), (angles.sin() * scaling).numpy()


def _frequencies(config: ModelConfig, dim: int) -> tuple[torch.Tensor, float]:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0
    # Imported here: it imports the rest of transformers.
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
    """Mistral has a window for all layers, Qwen for some, Llama none."""
    match config.model_type:
        case "mistral":
            return config.sliding_window
        case "qwen2" | "qwen3" if config.layer_types[layer] == "sliding_attention":
            return config.sliding_window
        case _:
            return None


def _joined(linears: Iterable[nn.Linear], pack: Pack) -> nn.Module:
    """One product in place of several with the same input."""
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
    """A tree of modules with transformers' names: matrices are nn.Linear, the rest holds a weight. Weights of `dtype`
    stay in the mapped file until they are copied.

    None unless the files hold every expected weight in its expected shape and a plain dtype.
    """
    places, expected = places_by_plain_name(directory), expected_weights(config)
    if not places.keys() >= expected.keys():
        return None
    weights = {}
    for name, weight in read_weights(directory, {name: places[name] for name in expected}):
        if weight.shape != expected[name] or weight.dtype not in _DTYPES:
            return None
        weights[name] = weight.to(dtype)
    if config.tie_word_embeddings:
        weights[f"{HEAD}.weight"] = weights[f"{EMBEDDING}.weight"]
    return _tree(weights)


def places_by_plain_name(directory: Path) -> dict[str, tuple[str, str]]:
    """Weight -> file, and its name there. Raises ConfigError as `weight_places` does."""
    return {plain_name(stored): (file, stored) for stored, file in weight_places(directory).items()}


def read_weights(directory: Path, places: dict[str, tuple[str, str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """`places`: name -> file, and name there. Reads one file at a time."""
    for file in sorted({file for file, _ in places.values()}):
        with safe_open(directory / file, "pt") as tensors:
            for name, (place, stored) in places.items():
                if place == file:
                    yield name, tensors.get_tensor(stored)


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
