"""The settings of a demo model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

#: The model directory of `make demo` and `demo`.
DEFAULT_DIRECTORY = ".cache/demo-model"
DEFAULT_VISION_DIRECTORY = ".cache/demo-vision-model"


@dataclass(frozen=True)
class Recipe:
    """All that decides the weights, besides Python's version and the CPU.

    Lengths are in tokens. A step trains on `batch * window` tokens; every `long_every`-th step uses them as one window,
    to train later positions. Learning rates are full until `full_share` of the steps are done.
    """

    revision: int = 3  # counts changes of text or training that no other field shows
    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 4096
    window: int = 256
    batch: int = 4
    steps: int = 260
    long_every: int = 10
    full_share: float = 0.3
    matrix_learning_rate: float = 3e-2
    learning_rate: float = 1.5e-2
    warmup_steps: int = 10
    weight_decay: float = 0.1
    threads: int = 2
    seed: int = 0

    def shape_of(self, step: int) -> tuple[int, int]:
        """(rows, length) of a step; steps count from one."""
        is_long = step % self.long_every == 0
        return (1, self.batch * self.window) if is_long else (self.batch, self.window)

    @property
    def digest(self) -> str:
        """Hex digest, equal exactly if every field is."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()

    def marker(self) -> dict[str, Any]:
        return {"digest": self.digest, "recipe": dataclasses.asdict(self)}


@dataclass(frozen=True)
class VisionRecipe(Recipe):
    """Adds images: a tower learns to see them, then the language model to answer about them."""

    steps: int = 400  # about as many tokens of text as without images
    texts_between_images: int = 2
    num_drawings: int = 6000
    tower_steps: int = 600
    tower_batch: int = 64
    tower_matrix_learning_rate: float = 2e-2
    tower_learning_rate: float = 3e-3


DEFAULT_RECIPE = Recipe()
VISION_RECIPE = VisionRecipe()
