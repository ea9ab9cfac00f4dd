"""A plain decoder's weights, taken out of a transformers model, packed, the originals let go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trtllm_disagg.embedded.linear import PackedLinear, packed

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Frequencies that do not depend on how long the sequence has become.
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")
_NO_NORM = np.empty(0, np.float32)


def supports(config: Any) -> bool:
    """`config` is transformers' configuration of the model."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _STATIC_ROPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


@dataclass(frozen=True, slots=True)
class PlainLayer:
    input_norm: np.ndarray
    qkv: PackedLinear
    q_norm: np.ndarray
    k_norm: np.ndarray
    #: One product, or with tensor parallelism one of all ranks together.
    output: nn.Module
    post_norm: np.ndarray
    gate_up: PackedLinear
    down: nn.Module
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class PlainModel:
    embedding: torch.Tensor
    layers: list[PlainLayer]
    final_norm: np.ndarray
    head: nn.Module
    num_heads: int
    eps: np.float32
    #: (positions, dim / 2) float32
    cos: np.ndarray
    sin: np.ndarray


def take_apart(model: Any, max_positions: int, kv_heads: int, head_dim: int) -> PlainModel:
    """`model` is transformers'; it cannot be used afterwards. `kv_heads` are this rank's."""
    config, decoder = model.config, model.model
    cos, sin = _rotations(decoder.rotary_emb, max_positions, head_dim)
    layers: list[PlainLayer] = []
    for i in range(len(decoder.layers)):
        layers.append(_take(decoder.layers[i], config))
        # At no time are there two copies of more than one layer.
        decoder.layers[i] = nn.Identity()
    return PlainModel(
        # Copies, here and of the norms: one number that stays in the mapped file keeps all of it in memory.
        embedding=decoder.embed_tokens.weight.detach().clone(),
        layers=layers,
        final_norm=_weights(decoder.norm),
        head=packed(model.lm_head),
        num_heads=config.num_attention_heads * kv_heads // config.num_key_value_heads,
        eps=np.float32(config.rms_norm_eps),
        cos=cos,
        sin=sin,
    )


def _take(layer: Any, config: Any) -> PlainLayer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return PlainLayer(
        input_norm=_weights(layer.input_layernorm),
        qkv=_joined((attention.q_proj, attention.k_proj, attention.v_proj)),
        q_norm=_weights(attention.q_norm) if has_norms else _NO_NORM,
        k_norm=_weights(attention.k_norm) if has_norms else _NO_NORM,
        output=packed(attention.o_proj),
        post_norm=_weights(layer.post_attention_layernorm),
        gate_up=_joined((mlp.gate_proj, mlp.up_proj)),
        down=packed(mlp.down_proj),
        scale=attention.scaling,
        window=_window(attention, config),
    )


def _window(attention: Any, config: Any) -> int | None:
    """Mistral's attention asks its configuration; the others know their own layer's window."""
    owner = config if config.model_type == "mistral" else attention
    return getattr(owner, "sliding_window", None)


def _joined(linears: Iterable[nn.Linear]) -> PackedLinear:
    """Several products with the same input as one."""
    parts = list(linears)
    weight = torch.cat([part.weight.detach() for part in parts])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=parts[0].bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    return PackedLinear(joined)


def _weights(norm: nn.Module) -> np.ndarray:
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach().to(torch.float32, copy=True).numpy()


def _rotations(rotary: Any, count: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, (positions, dim / 2) float32: transformers repeats each half."""
    cos, sin = rotary(torch.empty(1, dtype=torch.float32), torch.arange(count)[None])
    half = slice(0, dim // 2)
    return np.ascontiguousarray(cos[0, :, half].numpy()), np.ascontiguousarray(sin[0, :, half].numpy())
