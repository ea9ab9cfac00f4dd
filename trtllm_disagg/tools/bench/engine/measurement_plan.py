"""What `bench engine` measures: models, lengths of prompts and answers, batch sizes, and the number of rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtllm_disagg.tools.bench.models import ITEM_BYTES, Size

DTYPES = tuple(ITEM_BYTES)


def computed_in(dtype: str) -> str:
    """The dtype that a model of `dtype` is computed in, and its weights held in, on this CPU."""
    from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu

    return dtype if this_cpu().has_bfloat16 else "float32"


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    sizes: tuple[str, ...] = ("30M", "450M")
    dtypes: tuple[str, ...] = DTYPES
    threads: tuple[int, ...] = (1, 2)
    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int = 5
    prompt_tokens: int = 512
    #: Tokens of context of a decode row in the middle of the measured steps.
    context: int = 256
    steps: int = 16
    #: The sizes of the scaling curves.
    scaling_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    scaling_contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    scaling_pools: tuple[int, ...] = (256, 1024, 4096, 16384)
    block_pools: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)

    @property
    def largest_batch(self) -> int:
        return max(self.batches)

    @property
    def decode_prompt(self) -> int:
        return self.context - self.steps // 2

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the comparison."""
        return max(self.prompt_tokens, self.context + self.steps) + 64

    def with_options(self, **given: Sequence[Any] | int | None) -> MeasurementPlan:
        """The plan with the given fields replaced, except those that are None."""
        chosen = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
        return replace(self, **chosen)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a number of threads, and the plan by which it is measured."""

    plan: MeasurementPlan
    size: Size
    dtype: str
    #: Where checkpoints are kept.
    cache: Path
    threads: int = 1

    @property
    def model(self) -> str:
        return f"{self.size.name} {self.dtype}"

    @property
    def name(self) -> str:
        return f"{self.model} {self.threads}t"

    def prompts(self, count: int, tokens: int, seed: str) -> list[list[int]]:
        """Random prompts; the first n are the same for every count."""
        source = random.Random(seed)
        return [[source.randrange(3, self.size.vocab_size) for _ in range(tokens)] for _ in range(count)]


#: Well under a minute; shows that everything runs, not how fast the engine is.
QUICK = MeasurementPlan(
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
