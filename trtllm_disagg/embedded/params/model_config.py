"""Does config.json describe a model that the engine can serve? Asked of what it says, before anything is built from it.

transformers fills in what a file leaves out, and takes numbers that no model has. A wrong model would be served.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trtllm_disagg.errors import ConfigError

# Cosines and sines of rotary positions, as transformers' rotary embeddings compute them.


#: Frequencies that do not depend on how long the sequence has become.
STATIC_KINDS = ("default", "linear", "llama3", "yarn")


def is_static(config: Any) -> bool:
    """Can all positions be computed ahead? `config` is transformers' configuration of the model."""
    rope = config.rope_parameters
    return rope.get("rope_type", "default") in STATIC_KINDS and rope.get("partial_rotary_factor", 1.0) == 1.0


def rope_tables(config: Any, count: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions, dim / 2) float32 each, for `count` positions; the rotation's second half has the same ones."""
    frequencies, scaling = _frequencies(config, dim)
    angles = torch.arange(count)[:, None].float() * frequencies.float()
    return (angles.cos() * scaling).numpy(), (angles.sin() * scaling).numpy()


def _frequencies(config: Any, dim: int) -> tuple[torch.Tensor, float]:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0
    # Here, as it brings the rest of transformers along (plain_model.py).
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    return frequencies, float(scaling)


#: Families with outputs tested against transformers' own generate (test_families.py).
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "qwen3_moe", "mixtral")
#: What every checkpoint says, and the most that is believed. Far above any model, far below what breaks something.
_SIZES = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "max_position_embeddings": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_hidden_layers": 1 << 14,
    "vocab_size": 1 << 24,
}
#: What some say, or say to be null.
_MORE_SIZES = {
    "head_dim": 1 << 14,
    "moe_intermediate_size": 1 << 22,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "num_local_experts": 1 << 14,
    "sliding_window": 1 << 40,
}
#: `dynamic` is `default` up to max_position_embeddings, where this engine ends. `longrope` turns positions of one
#: request by how long another one in the batch is.
_ROPE_KINDS = (*STATIC_KINDS, "dynamic")
_ROPE_NUMBERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
    "rope_theta",
)
_QUANTISED = "no value: the embedded engine serves float32, bfloat16 and float16 weights, not quantised ones"


def check_config(file: Path, raw: dict[str, Any]) -> None:
    """`raw` is the content of `file`. Raises ConfigError for the first value that cannot be."""

    def refuse(key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError.bad_value(f"{file} {key}", value, allowed)

    if raw.get("model_type") not in FAMILIES:
        raise refuse("model_type", raw.get("model_type"), f"one of {', '.join(FAMILIES)}")
    if raw.get("quantization_config") is not None:
        raise refuse("quantization_config", raw["quantization_config"], _QUANTISED)
    if (quantised := file.with_name("hf_quant_config.json")).exists():
        raise ConfigError(f"model: {quantised} says that the checkpoint is quantised; expected {_QUANTISED}")
    for key, most in _SIZES.items():
        if not _is_size(raw.get(key), most):
            raise refuse(key, raw.get(key), f"a whole number from 1 to {most}")
    for key, most in _MORE_SIZES.items():
        if raw.get(key) is not None and not _is_size(raw[key], most):
            raise refuse(key, raw[key], f"a whole number from 1 to {most}, or null")
    if not _is_positive(raw.get("rms_norm_eps")):
        raise refuse("rms_norm_eps", raw.get("rms_norm_eps"), "a number above 0")
    if raw.get("rope_theta") is not None and not _is_positive(raw["rope_theta"]):
        raise refuse("rope_theta", raw["rope_theta"], "a number above 0")
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(file, key, raw.get(key))
    _check_counts(file, raw)


def check_activation(file: Path, name: str) -> None:
    """Raises ConfigError for an activation that transformers does not know."""
    if name in ("silu", "swish"):
        return
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise ConfigError.bad_value(f"{file} hidden_act", name, f"one of {', '.join(sorted(ACT2FN))}")


def end_ids(file: Path, found: object, vocab_size: int) -> list[int]:
    """`found` is what `file` says under eos_token_id: an id, several, or nothing. Raises ConfigError for others."""
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(each) is int and 0 <= each < vocab_size for each in ids):
        raise ConfigError.bad_value(
            f"{file} eos_token_id", found, f"a token id below vocab_size {vocab_size}, or several"
        )
    return list(ids)


def _check_rope(file: Path, key: str, rope: object) -> None:
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise ConfigError.bad_value(f"{file} {key}", rope, "an object, or null")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise ConfigError.bad_value(f"{file} {key}.rope_type", kind, f"one of {', '.join(_ROPE_KINDS)}")
    for name in _ROPE_NUMBERS:
        if rope.get(name) is not None and not _is_positive(rope[name]):
            raise ConfigError.bad_value(f"{file} {key}.{name}", rope[name], "a number above 0")


def _check_counts(file: Path, raw: dict[str, Any]) -> None:
    """What one key says must fit to what another one says."""
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise ConfigError.bad_value(f"{file} num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    if raw.get("head_dim") is None and raw["hidden_size"] % heads:
        raise ConfigError.bad_value(
            f"{file} num_attention_heads", heads, f"a divisor of hidden_size {raw['hidden_size']}"
        )
    if (raw.get("head_dim") or raw["hidden_size"] // heads) % 2:
        raise ConfigError.bad_value(
            f"{file} head_dim", raw.get("head_dim"), "an even number: rotary positions turn pairs"
        )
    experts, chosen = raw.get("num_local_experts") or raw.get("num_experts"), raw.get("num_experts_per_tok")
    if experts is not None and chosen is not None and chosen > experts:
        raise ConfigError.bad_value(f"{file} num_experts_per_tok", chosen, f"at most the {experts} experts")
    types = raw.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != raw["num_hidden_layers"]):
        raise ConfigError.bad_value(
            f"{file} layer_types", types, f"a list of {raw['num_hidden_layers']} types, one a layer"
        )


def _is_size(value: object, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]
