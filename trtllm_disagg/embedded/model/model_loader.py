"""A Hugging Face checkpoint directory -> its shape, and its modules over our attention."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from trtllm_disagg.embedded.model import attention
from trtllm_disagg.embedded.model.plain_model import read_plain
from trtllm_disagg.embedded.params.checkpoint import check_checkpoint, fingerprint, read_json, shown
from trtllm_disagg.embedded.params.model_config import ModelConfig, end_ids, read_config
from trtllm_disagg.errors import ConfigError

#: The lean forward, or transformers' modules.
ForwardKind = Literal["plain", "modules"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine needs to know about a model."""

    config: ModelConfig
    end_ids: list[int]
    #: Of the weights as they are read, and of the KV pool, whatever is computed in.
    dtype: torch.dtype
    #: Hash of configuration and weights: two workers of one deployment must agree on it.
    fingerprint: str


def read_shape(directory: Path, dtype: str) -> ModelShape:
    """Raises ConfigError for what cannot be served, before anything big is loaded."""
    config = read_config(directory)
    check_checkpoint(directory, config, any_dtype=dtype != "auto")
    raw = read_json(directory / "config.json")
    return ModelShape(
        config=config,
        end_ids=_end_ids(directory, raw),
        dtype=_dtype(raw, dtype),
        fingerprint=fingerprint(directory),
    )


def load_model(directory: Path, shape: ModelShape, kind: ForwardKind) -> Any:
    """A tree of modules: transformers' model, or for `plain` its weights alone. Raises ConfigError for a broken
    checkpoint.
    """
    try:
        if kind == "plain" and (plain := read_plain(directory, shape.config, shape.dtype)):
            return plain
        return _load_with_transformers(directory, shape)
    except ConfigError:
        raise
    except Exception as error:  # a wrong setting may surface as any kind
        raise ConfigError(f"model: cannot load {directory}: {type(error).__name__}: {error}") from error


def _load_with_transformers(directory: Path, shape: ModelShape) -> Any:
    """In eval mode and with our attention."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # What it finds goes into one error of ours.
    transformers_logging.set_verbosity_error()
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=shape.dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # transformers goes on with random ones.
    if bad := sorted(report["missing_keys"]) + sorted(name for name, *_ in report["mismatched_keys"]):
        raise ConfigError(
            f"model: {directory} lacks {len(bad)} weights, or has them in another shape than config.json asks for: "
            f"{shown(bad)}"
        )
    # A name without a mask function: transformers then builds no mask at all, which is what we want.
    model.config._attn_implementation = attention.NAME
    return model.eval().requires_grad_(False)


def _end_ids(directory: Path, config: dict[str, Any]) -> list[int]:
    """End-of-sequence ids: generation_config.json's when it has some, else config.json's."""
    generation = directory / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.exists() else None
    if found is not None:
        return end_ids(generation, found, config["vocab_size"])
    return end_ids(directory / "config.json", config.get("eos_token_id"), config["vocab_size"])


def _dtype(config: dict[str, Any], wanted: str) -> torch.dtype:
    said = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = said if wanted == "auto" else wanted
    if name in _DTYPES:
        return _DTYPES[name]
    expected = f"one of {', '.join(_DTYPES)} on the embedded engine"
    if wanted == "auto":
        allowed = f"{expected}, to which the weights are converted: config.json says {said!r}"
        raise ConfigError.bad_value("dtype", wanted, allowed)
    raise ConfigError.bad_value("dtype", name, f"auto or {expected}")
