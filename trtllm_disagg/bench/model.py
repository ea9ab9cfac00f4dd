"""A checkpoint with random weights: speed does not depend on what they say, and it takes a second to make."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

#: nanoGPT's "baby GPT" (6 layers, 6 heads, 384 wide: 11M parameters) as a Llama, with room for 4k prompts.
SETTINGS: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    # Large, so that the next token depends strongly on all that came before.
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DEFAULT_DIRECTORY = Path(".cache/bench-model")


def random_checkpoint(directory: Path, **overrides: Any) -> Path:
    """Makes it in `directory` unless it is there with the same settings. A reader never sees half of it."""
    settings = SETTINGS | overrides
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
    return int(json.loads((model / "config.json").read_text())["vocab_size"])
