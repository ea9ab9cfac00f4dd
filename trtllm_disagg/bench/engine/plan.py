"""What is measured: the models, the lengths, the batches, and how often."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
DTYPES = tuple(ITEM_BYTES)


def computed_in(dtype: str) -> str:
    """The dtype that a model of `dtype` is computed in, and its weights held in, on this CPU."""
    return dtype if this_cpu().has_bfloat16 else "float32"


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama with random weights; every size has grouped heads of 64."""

    name: str
    settings: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.settings["vocab_size"])

    @property
    def layer_parameters(self) -> int:
        """Of all matrices of the layers: what a prompt token is multiplied with."""
        s = self.settings
        hidden, intermediate = s["hidden_size"], s["intermediate_size"]
        kv = hidden * s["num_key_value_heads"] // s["num_attention_heads"]
        return int(
            s["num_hidden_layers"] * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate)
        )

    @property
    def streamed_parameters(self) -> int:
        """Read from memory in every step: all but the embedding table, of which a step reads a row a token."""
        return self.layer_parameters + self.vocab_size * int(self.settings["hidden_size"])

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        s = self.settings
        head_dim = s["hidden_size"] // s["num_attention_heads"]
        return int(2 * s["num_hidden_layers"] * s["num_key_value_heads"] * head_dim * item_bytes)

    @property
    def parameters(self) -> int:
        return self.streamed_parameters + self.vocab_size * int(self.settings["hidden_size"])


def _llama(name: str, hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocab: int) -> Size:
    return Size(
        name,
        {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "initializer_range": 0.05,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    )


SIZES = {
    size.name: size
    for size in (
        _llama("1M", hidden=128, layers=4, heads=2, kv=1, intermediate=384, vocab=512),
        _llama("30M", hidden=512, layers=8, heads=8, kv=4, intermediate=1536, vocab=4096),
        _llama("450M", hidden=1024, layers=24, heads=16, kv=8, intermediate=4096, vocab=32000),
    )
}


@dataclass(frozen=True, slots=True)
class Plan:
    sizes: tuple[str, ...] = ("30M", "450M")
    dtypes: tuple[str, ...] = DTYPES
    threads: tuple[int, ...] = (1, 2)
    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int = 5
    prompt_tokens: int = 512
    #: Of a decode row, in the middle of the measured steps.
    context: int = 256
    steps: int = 16
    #: Of the charts.
    scaling_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    scaling_contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    scaling_pools: tuple[int, ...] = (256, 1024, 4096, 16384)
    block_pools: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)

    @property
    def decode_prompt(self) -> int:
        return self.context - self.steps // 2

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the comparison."""
        return max(self.prompt_tokens, self.context + self.steps) + 64

    def prompts(self, size: Size, count: int, tokens: int, seed: str) -> list[list[int]]:
        """Random; the first n of them are the same for every count."""
        source = random.Random(seed)
        return [[source.randrange(3, size.vocab_size) for _ in range(tokens)] for _ in range(count)]

    def with_options(self, **given: Sequence[Any] | int | None) -> Plan:
        """None leaves what is there."""
        chosen = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
        return replace(self, **chosen)  # type: ignore[arg-type]


#: Well under a minute; shows that everything runs, not how fast the engine is.
QUICK = Plan(
    sizes=("1M",),
    dtypes=("float32",),
    threads=(1,),
    batches=(1, 4),
    rounds=2,
    prompt_tokens=64,
    context=64,
    steps=8,
    scaling_batches=(1, 4),
    scaling_contexts=(64, 128),
    scaling_pools=(64, 256),
    block_pools=(1_000, 10_000),
)
