"""The settings of a demo model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

#: The model directory of `make demo` and `demo`.
DEFAULT_DIRECTORY = ".cache/demo-model"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from Python's version and the CPU.

    Lengths are in tokens. A step trains on `batch * window` tokens. Every `long_every`-th step sees them as one single
    window, so that the model has met positions beyond the short ones. The learning rates are full until `full_share`
    of the steps are done.
    """

    revision: int = 2  # counts changes of the text or the training that no other field shows
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
    steps: int = 200
    long_every: int = 10
    full_share: float = 0.3
    matrix_learning_rate: float = 3e-2
    learning_rate: float = 1.5e-2
    warmup_steps: int = 10
    weight_decay: float = 0.1
    threads: int = 2
    seed: int = 0

    def shape_of(self, step: int) -> tuple[int, int]:
        """(rows, length) of a step, counted from one."""
        is_long = step % self.long_every == 0
        return (1, self.batch * self.window) if is_long else (self.batch, self.window)

    @property
    def digest(self) -> str:
        """Hex; equal exactly when every field is."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()

    def marker(self) -> dict[str, Any]:
        return {"digest": self.digest, "recipe": dataclasses.asdict(self)}


DEFAULT_RECIPE = Recipe()
