"""A Hugging Face checkpoint directory -> a transformers model with our attention, ready for the step."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_disagg.embedded import attention
from trtllm_disagg.embedded.attention import KvPool
from trtllm_disagg.embedded.experts import pack_experts
from trtllm_disagg.embedded.hf_forward import HfForward
from trtllm_disagg.embedded.linear import pack_linears, packing_works, unmap
from trtllm_disagg.embedded.model_runner import Forward
from trtllm_disagg.embedded.plain_forward import PlainForward, supports
from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)

#: Families whose outputs are tested against transformers' own generate (tests/unit/test_families.py).
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "qwen3_moe", "mixtral")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine needs to know about a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    end_ids: list[int]
    dtype: torch.dtype
    #: Hash of configuration and weights: two workers of one deployment must agree on it.
    fingerprint: str


def read_shape(directory: Path, dtype: str) -> ModelShape:
    """Raises ConfigError for what cannot be served, before anything big is loaded."""
    config = _read_json(directory / "config.json")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError.bad_value(
            f"{directory}/config.json model_type", family, f"one of {', '.join(FAMILIES)}"
        )
    if not list(directory.glob("*.safetensors")):
        raise ConfigError(f"model: {directory} holds no *.safetensors file")
    heads = int(config["num_attention_heads"])
    return ModelShape(
        num_layers=int(config["num_hidden_layers"]),
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocab_size=int(config["vocab_size"]),
        max_positions=int(config.get("max_position_embeddings") or 2048),
        end_ids=_end_ids(directory, config),
        dtype=_dtype(config, dtype),
        fingerprint=_fingerprint(directory),
    )


def load_model(directory: Path, shape: ModelShape) -> Any:
    """transformers' model, in eval mode and with our attention. Raises ConfigError for a broken checkpoint."""
    from safetensors import SafetensorError
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=shape.dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"model: cannot load {directory}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        # transformers goes on with random ones.
        raise ConfigError(f"model: {directory} lacks {len(missing)} weights: {', '.join(missing[:3])}")
    # A name without a mask function: transformers then builds no mask at all, which is what we want.
    model.config._attn_implementation = attention.NAME
    return model.eval().requires_grad_(False)


def make_forward(model: Any, pool: KvPool, max_positions: int, kind: str) -> Forward:
    """The model as a step calls it. `kind` transformers: its own modules even where a leaner forward is known."""
    if pool.kv.is_cuda:
        return HfForward(model.to(pool.kv.device), pool)
    if not packing_works():
        log.warning(
            "oneDNN weight packing does not work with torch %s: slower, and not batch-invariant",
            torch.__version__,
        )
        return HfForward(model, pool)
    if kind == "auto" and supports(model.config):
        return PlainForward(model, pool, max_positions)
    pack_experts(model)
    pack_linears(model)
    unmap(model)
    return HfForward(model, pool)


def _end_ids(directory: Path, config: dict[str, Any]) -> list[int]:
    """End-of-sequence ids: generation_config.json's when it has some, else config.json's."""
    generation = directory / "generation_config.json"
    found = _read_json(generation).get("eos_token_id") if generation.exists() else None
    found = found if found is not None else config.get("eos_token_id")
    return [found] if isinstance(found, int) else list(found or [])


def _dtype(config: dict[str, Any], wanted: str) -> torch.dtype:
    name = wanted if wanted != "auto" else config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ConfigError.bad_value(
            "dtype", name, f"auto or one of {', '.join(_DTYPES)} on the embedded engine"
        )
    return _DTYPES[name]


def _fingerprint(directory: Path) -> str:
    """Over config.json and, of each weight file, its size and both ends (the start holds all names and shapes)."""
    hasher = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            hasher.update(path.name.encode() + size.to_bytes(8, "little") + file.read(65536))
            file.seek(max(0, size - 65536))
            hasher.update(file.read())
    return hasher.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"model: {path} is not a JSON object")
    return loaded
