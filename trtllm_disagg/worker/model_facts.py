"""Reads from a model's directory the precision and shape on which workers that share its KV must agree."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The keys of config.json that decide the vocabulary and the size and meaning of one token's KV.
_KEYS = """
    architectures model_type num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_size
    kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim sliding_window layer_types rope_theta rope_scaling
    vocab_size
"""
_SHAPE = tuple(_KEYS.split())
_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The defaults mean an unknown model, outside a local directory."""

    #: Type of unquantised weights and activations.
    dtype: str = _AUTO
    #: The meaning of `kv_cache_config.dtype: auto`.
    kv_dtype: str = _AUTO
    #: Quantisation of the weights: fp8, nvfp4, ...; empty for none.
    precision: str = ""
    #: Hash of shape and tokenizer, equal for one model's checkpoints in any precision; empty if unknown.
    layout: str = ""
    max_positions: int | None = None


UNKNOWN_MODEL = ModelFacts()


def read_model_facts(model: str | Path) -> ModelFacts:
    """Never raises: the engine reports a bad model."""
    directory = Path(os.path.expanduser(model))
    config = _read(directory / "config.json")
    if not config:
        return UNKNOWN_MODEL
    # A multimodal model has its language model's configuration in `text_config`.
    text = {**config, **_mapping(config.get("text_config"))}
    precision, kv_precision = _quantization(config, _read(directory / "hf_quant_config.json"))
    dtype = str(text.get("torch_dtype") or text.get("dtype") or _AUTO)
    return ModelFacts(dtype, kv_precision or dtype, precision, _layout(text, directory), _max_positions(text))


def _quantization(config: Mapping[str, Any], modelopt: Mapping[str, Any]) -> tuple[str, str]:
    """(algorithm of the weights, of the KV) in lower case; empty if unquantised."""
    of_config = _mapping(config.get("quantization_config"))
    of_modelopt = _mapping(modelopt.get("quantization")) or of_config
    precision = of_modelopt.get("quant_algo") or of_config.get("quant_method") or ""
    kv_precision = of_modelopt.get("kv_cache_quant_algo") or ""
    scheme = _mapping(of_config.get("kv_cache_scheme"))
    if not kv_precision and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
        kv_precision = "fp8"
    return str(precision).lower(), str(kv_precision).lower()


def _layout(text: Mapping[str, Any], directory: Path) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    hasher.update(json.dumps({key: text.get(key) for key in _SHAPE}, sort_keys=True).encode())
    try:
        hasher.update((directory / "tokenizer.json").read_bytes())
    except OSError:
        return ""  # two models of one shape differ only in the tokenizer
    return hasher.hexdigest()


def _max_positions(text: Mapping[str, Any]) -> int | None:
    """The longest sequence that TensorRT-LLM infers."""
    value = text.get("max_position_embeddings")
    scaling = _mapping(text.get("rope_scaling") or text.get("rope_parameters"))
    stretches = scaling.get("type", scaling.get("rope_type")) in ("linear", "dynamic")
    factor = scaling.get("factor", 1) if stretches else 1
    try:
        return int(value * factor) if isinstance(value, int) and isinstance(factor, int | float) else None
    except (OverflowError, ValueError):  # Python's JSON has Infinity and NaN
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
