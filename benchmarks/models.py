"""Makes models with random weights (speed does not depend on their values), and a model without weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_disagg.errors import ConfigError

#: nanoGPT's "baby GPT" (6 layers, 6 heads, 384 wide: 11M parameters) as a Llama, with room for 4k prompts.
NANOGPT: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    # Large: the next token depends strongly on all earlier ones.
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
NANOGPT_DIRECTORY = Path(".cache/bench-model")


def random_checkpoint(directory: Path, settings: Mapping[str, Any] = NANOGPT) -> Path:
    """Write a checkpoint into `directory`, unless it has one with these settings. Replaces files atomically."""
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


def weightless_model(directory: Path) -> Path:
    """Write a model without weights for the recording engine: a byte tokenizer and a config.json.

    A token id is a byte's index in the byte alphabet: 0 to 93 are printable ASCII, bos is 256, eos 257.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: place for place, char in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = NANOGPT | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def vocab_size(model: Path) -> int:
    """Raises ConfigError for a config.json without vocab_size."""
    file = model / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return int({**config, **(config.get("text_config") or {})}["vocab_size"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError.bad_value("--model", str(file), "a config.json with vocab_size") from error
