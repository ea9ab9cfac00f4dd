"""Makes a model without weights, for measurements of what is around an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
