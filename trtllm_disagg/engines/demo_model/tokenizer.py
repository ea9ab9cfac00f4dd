"""A byte-level BPE tokenizer and the chat format, for transformers as well as for Dynamo's Rust frontend."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.engines.demo_model.recipe import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# (role, text) in the order in which they were said.
Conversation = list[tuple[str, str]]

BOS, EOS, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% elif message['role'] in ('system', 'developer') %}<|system|>"
    "{% else %}<|user|>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_passage(text: str) -> str:
    return f"{BOS}{text}{EOS}"


def render_conversation(talk: Conversation) -> str:
    """The text that CHAT_TEMPLATE makes of the same messages; a test compares the two."""
    marks = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
    turns = (f"{marks[role]}{text}{EOS if role == 'assistant' else ''}" for role, text in talk)
    return BOS + "".join(turns)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, recipe: Recipe) -> None:
    """Writes the files itself, because transformers would put the chat template into a separate file."""
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for token in SPECIAL_TOKENS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.max_positions,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
