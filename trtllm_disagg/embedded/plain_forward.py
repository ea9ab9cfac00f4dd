"""A lean forward for the plain decoder families on the CPU: four matrix products a layer, one kernel between each.

Same numbers as transformers' own modules (tests/unit/test_families.py), at a fraction of their operations. Takes
the weights out of a transformers model, packs them, and lets the originals go. Whatever it does not know runs
through `hf_forward.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trtllm_disagg.embedded import kernels
from trtllm_disagg.embedded.attention import KvPool, StepLayout
from trtllm_disagg.embedded.linear import PackedLinear, packed
from trtllm_disagg.embedded.views import as_array

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


@dataclass(slots=True)
class _Layer:
    input_norm: np.ndarray
    qkv: PackedLinear
    q_norm: np.ndarray
    k_norm: np.ndarray
    output: nn.Module
    post_norm: np.ndarray
    gate_up: PackedLinear
    down: nn.Module
    scale: float
    window: int | None


class PlainForward:
    def __init__(self, model: Any, pool: KvPool, max_positions: int) -> None:
        """Takes `model` apart: it cannot be used afterwards."""
        config, decoder = model.config, model.model
        self._dtype = decoder.embed_tokens.weight.dtype
        self._embedding: torch.Tensor = decoder.embed_tokens.weight.detach()
        self._eps = np.float32(config.rms_norm_eps)
        # This rank's heads: of tensor parallelism, the pool has a part.
        kv_heads, self._head_dim = pool.kv.shape[-2:]
        self._num_heads = config.num_attention_heads * kv_heads // config.num_key_value_heads
        self._cos, self._sin = _rotations(decoder.rotary_emb, max_positions, self._head_dim)
        self._final_norm = _weights(decoder.norm)
        self._keys = [as_array(keys) for keys in pool.keys]
        self._values = [as_array(values) for values in pool.values]
        self._head = packed(model.lm_head)
        self._layers: list[_Layer] = []
        for i in range(len(decoder.layers)):
            self._layers.append(_take(decoder.layers[i], config))
            # At no time are there two copies of more than one layer.
            decoder.layers[i] = nn.Identity()

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits of the rows in `layout.last`: (sampling rows, vocabulary)."""
        x = self._embedding[torch.tensor(tokens)].float()
        residual = as_array(x)
        hidden = torch.empty(x.shape, dtype=self._dtype)
        kernels.rms_norm(residual, self._layers[0].input_norm, self._eps, as_array(hidden))
        for i, layer in enumerate(self._layers):
            attended = self._attend(i, layer, hidden, layout)
            if i == len(self._layers) - 1:
                # Nobody looks at the other rows any more.
                attended, x = attended[layout.last], x[layout.last]
                residual, hidden = as_array(x), torch.empty(x.shape, dtype=self._dtype)
            norm = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._final_norm
            self._feed_forward(layer, attended, residual, hidden, norm)
        logits: torch.Tensor = self._head(hidden)
        return logits

    def _attend(self, i: int, layer: _Layer, hidden: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, heads * dim); the tokens' K and V are in the pool afterwards."""
        qkv = layer.qkv(hidden)
        query = torch.empty((len(qkv), self._num_heads, self._head_dim), dtype=self._dtype)
        kernels.rotate_and_store(
            as_array(qkv),
            layout.position_array,
            layout.slot_array,
            self._cos,
            self._sin,
            layer.q_norm,
            layer.k_norm,
            self._eps,
            self._keys[i],
            self._values[i],
            as_array(query),
        )
        return layout.attend_stored(i, query, layer.scale, layer.window).view(len(qkv), -1)

    def _feed_forward(
        self,
        layer: _Layer,
        attended: torch.Tensor,
        residual: np.ndarray,
        hidden: torch.Tensor,
        next_norm: np.ndarray,
    ) -> None:
        """Adds attention and feed-forward to the residual; `hidden` becomes the next layer's normalised input."""
        normalised = as_array(hidden)
        delta = layer.output(attended)
        kernels.add_rms_norm(residual, as_array(delta), layer.post_norm, self._eps, normalised)
        gate_up = layer.gate_up(hidden)
        activated = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=self._dtype)
        kernels.silu_mul(as_array(gate_up), as_array(activated))
        delta = layer.down(activated)
        kernels.add_rms_norm(residual, as_array(delta), next_norm, self._eps, normalised)


def _take(layer: Any, config: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return _Layer(
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
    return weight.detach().float().numpy()


def _rotations(rotary: Any, count: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, (positions, dim / 2) float32: transformers repeats each half."""
    cos, sin = rotary(torch.empty(1, dtype=torch.float32), torch.arange(count)[None])
    half = slice(0, dim // 2)
    return np.ascontiguousarray(cos[0, :, half].numpy()), np.ascontiguousarray(sin[0, :, half].numpy())
