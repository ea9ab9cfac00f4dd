"""A Hugging Face checkpoint directory -> its modules over our attention."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

from trtllm_disagg.engines.embedded.model import attention
from trtllm_disagg.engines.embedded.model.plain_model import read_plain
from trtllm_disagg.engines.embedded.params.checkpoint import require_all, shown
from trtllm_disagg.engines.embedded.params.model_shape import ModelShape
from trtllm_disagg.errors import ConfigError

#: The plain forward, or transformers' modules.
ForwardKind = Literal["plain", "modules"]


def load_model(directory: Path, shape: ModelShape, kind: ForwardKind) -> Any:
    """A tree of modules: transformers' model, or for `plain` its weights alone. Raises ConfigError for a broken
    checkpoint.
    """
    try:
        if kind == "plain" and (plain := read_plain(directory, shape.config, shape.torch_dtype)):
            return plain
        return _load_with_transformers(directory, shape)
    except ConfigError:
        raise
    except Exception as error:  # a wrong setting may surface as any kind
        raise ConfigError(f"model: cannot load {directory}: {type(error).__name__}: {error}") from error


def _load_with_transformers(directory: Path, shape: ModelShape) -> Any:
    """transformers' model, in eval mode and with our attention."""
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
            dtype=shape.torch_dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # transformers goes on with random ones, or without.
    if wrong := sorted(name for name, *_ in report["mismatched_keys"]):
        raise ConfigError(f"model: {directory}: {shown(wrong)} has another shape than config.json asks for")
    require_all(directory, sorted(report["missing_keys"]), report["unexpected_keys"], shape.config)
    # A name without a mask function: transformers then builds no mask at all, which is what we want.
    model.config._attn_implementation = attention.NAME
    # What training left in config.json: a router that is packed (pack.py) has no logits to give.
    model.config.output_router_logits = False
    model.config.return_dict = True
    return model.eval().requires_grad_(False)
