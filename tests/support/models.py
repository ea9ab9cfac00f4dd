"""Writes tiny random checkpoints of each family as Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 258
EOS = 1


def write_checkpoint(directory: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """A 4-layer model with large random weights, so that its greedy answers vary."""
    import torch
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        # A multiple of the vector width: element-wise kernels treat the odd rest differently.
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.06,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    if family == "mistral":
        settings["sliding_window"] = 40
    if family == "qwen3":
        settings["head_dim"] = 16
    if family == "gemma2":
        # Every other layer has the window. The vocabulary again fits the vector width, for the logits' cap.
        settings |= {"sliding_window": 40, "head_dim": 16, "query_pre_attn_scalar": 24, "vocab_size": 320}
        settings |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    if family == "qwen3_moe":
        # The first layer is dense.
        settings |= {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
        settings |= {"mlp_only_layers": [0], "norm_topk_prob": True}
    if family == "mixtral":
        settings |= {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 40}
    settings |= overrides
    config_class = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
        "gemma2": transformers.Gemma2Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "mixtral": transformers.MixtralConfig,
    }[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**settings), dtype=torch.float32)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path, image_token: str = "") -> None:
    """Bytes as tokens: token id = byte + 2, after bos (0) and eos (1). `image_token` replaces the last byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
    if image_token:
        vocabulary[image_token] = vocabulary.pop(alphabet[-1])
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *filter(None, [image_token])])
    tokenizer.save(str(directory / "tokenizer.json"))
    content = _PARTS % image_token if image_token else "{{ m['content'] }}"
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: " + content + "\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 2048,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


#: Takes lists of parts only.
_PARTS = (
    "{%% for part in m['content'] %%}{%% if part['type'] == 'text' %%}{{ part['text'] }}"
    "{%% else %%}%s{%% endif %%}{%% endfor %%}"
)


def greedy_answer(model: Any, prompt: list[int], count: int) -> list[int]:
    """The answer of transformers' own generate."""
    import torch

    tokens = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer
