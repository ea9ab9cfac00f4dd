"""Makes models with random weights for measurements: speed does not depend on the values of weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
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
    # Large, so that the next token depends strongly on all earlier ones.
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
NANOGPT_DIRECTORY = Path(".cache/bench-model")


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama with random weights; every size has grouped heads of 64."""

    name: str
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, name: str, hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocab: int
    ) -> Size:
        shape = {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }
        return cls(name, NANOGPT | shape)

    @property
    def vocab_size(self) -> int:
        return int(self.settings["vocab_size"])

    @property
    def layer_parameters(self) -> int:
        """The parameters of all matrices in the layers, with which each prompt token is multiplied."""
        s = self.settings
        hidden, intermediate = s["hidden_size"], s["intermediate_size"]
        kv = hidden * s["num_key_value_heads"] // s["num_attention_heads"]
        layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate
        return int(s["num_hidden_layers"] * layer)

    @property
    def streamed_parameters(self) -> int:
        """The parameters read in every step: all but the embedding table, of which a step reads one row a token."""
        return self.layer_parameters + self.vocab_size * int(self.settings["hidden_size"])

    @property
    def parameters(self) -> int:
        return self.streamed_parameters + self.vocab_size * int(self.settings["hidden_size"])

    def kv_bytes_per_token(self, dtype: str) -> int:
        s = self.settings
        head_dim = s["hidden_size"] // s["num_attention_heads"]
        return int(2 * s["num_hidden_layers"] * s["num_key_value_heads"] * head_dim * ITEM_BYTES[dtype])


SIZES = {
    size.name: size
    for size in (
        Size.of("1M", hidden=128, layers=4, heads=2, kv=1, intermediate=384, vocab=512),
        Size.of("30M", hidden=512, layers=8, heads=8, kv=4, intermediate=1536, vocab=4096),
        Size.of("450M", hidden=1024, layers=24, heads=16, kv=8, intermediate=4096, vocab=32000),
    )
}


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
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def weightless_model(directory: Path) -> Path:
    """A directory without weights, for the recording engine: a tokenizer of bytes and a config.json.

    Token id = byte's place in the byte alphabet, so 0 to 93 are printable ASCII; bos is 256, eos 257.
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
    size = Size.of("weightless", hidden=8, layers=1, heads=1, kv=1, intermediate=8, vocab=len(vocabulary))
    config = {
        **size.settings,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
