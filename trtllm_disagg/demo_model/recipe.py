"""What makes one demo model differ from another."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from Python's version and the CPU.

    Lengths are in tokens. A step trains on `batch * window` tokens. The last `long_share` of the steps see
    them as one single window, so that the model has met positions beyond the short ones.
    """

    revision: int = 1  # counts changes of the text or the training that no other field shows
    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 4096
    window: int = 128
    batch: int = 8
    steps: int = 330
    long_share: float = 0.15
    matrix_learning_rate: float = 3e-2
    learning_rate: float = 1.5e-2
    warmup_steps: int = 20
    weight_decay: float = 0.1
    threads: int = 2
    seed: int = 0

    @property
    def digest(self) -> str:
        """Hex; equal exactly when every field is."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()

    def marker(self) -> dict[str, Any]:
        return {"digest": self.digest, "recipe": dataclasses.asdict(self)}


DEFAULT_RECIPE = Recipe()
