"""Makes models with random weights: speed does not depend on the values of weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.models import NANOGPT

NANOGPT_DIRECTORY = Path(".cache/bench-model")


def random_checkpoint(directory: Path, settings: Mapping[str, Any] = NANOGPT) -> Path:
    """Makes a checkpoint in `directory` unless one with the same settings is there. Files are replaced whole."""
    marker = directory / "bench_model.json"
    if marker.is_file() and json.loads(marker.read_text()) == settings:
        return directory
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        model.save_pretrained(scratch)
        directory.mkdir(exist_ok=True)
        for file in Path(scratch).iterdir():
            file.replace(directory / file.name)
    marker.write_text(json.dumps(settings))
    return directory


def vocab_size(model: Path) -> int:
    """Raises ConfigError for a config.json without vocab_size."""
    file = model / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return int({**config, **(config.get("text_config") or {})}["vocab_size"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError.bad_value("--model", str(file), "a config.json with vocab_size") from error
