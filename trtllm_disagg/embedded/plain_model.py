"""A plain decoder's weights, taken out of its tree of modules, packed, the originals let go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trtllm_disagg.activity import LOADING, NullReporter, Reporter
from trtllm_disagg.embedded.pack import Pack, packed
from trtllm_disagg.embedded.rope_tables import is_static, rope_tables

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_NO_NORM = np.empty(0, np.float32)


def supports(config: Any) -> bool:
    """`config` is transformers' configuration of the model."""
    return config.model_type in FAMILIES and config.hidden_act == "silu" and is_static(config)


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
    scale: float
    window: int | None


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
    model: Any, max_positions: int, kv_heads: int, head_dim: int, pack: Pack, reporter: Reporter | None = None
) -> PlainModel:
    """`model` is transformers' or plain_weights.py's; it cannot be used afterwards. `kv_heads` are this rank's."""
    reporter = reporter or NullReporter()
    config, decoder = model.config, model.model
    cos, sin = rope_tables(config, max_positions, head_dim)
    layers: list[PlainLayer] = []
    for i in range(len(decoder.layers)):
        # Weights that stayed in their mapped file are read here.
        reporter.tell(LOADING, percent=100 * i // len(decoder.layers))
        layers.append(_take(decoder.layers[i], head_dim, _window(config, i), pack))
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


def _take(layer: Any, head_dim: int, window: int | None, pack: Pack) -> PlainLayer:
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
        scale=head_dim**-0.5,
        window=window,
    )


def _window(config: Any, layer: int) -> int | None:
    """Mistral has one window for all layers, the Qwens for some, Llama none."""
    match config.model_type:
        case "mistral":
            return config.sliding_window  # type: ignore[no-any-return]
        case "qwen2" | "qwen3" if config.layer_types[layer] == "sliding_attention":
            return config.sliding_window  # type: ignore[no-any-return]
        case _:
            return None


def _joined(linears: Iterable[nn.Linear], pack: Pack) -> nn.Module:
    """Several products with the same input as one."""
    parts = list(linears)
    weight = torch.cat([part.weight.detach() for part in parts])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=parts[0].bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    return pack(joined)


def _weights(norm: nn.Module) -> np.ndarray:
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach().to(torch.float32, copy=True).numpy()
