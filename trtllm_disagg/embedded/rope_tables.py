"""Cosines and sines of rotary positions, as transformers' rotary embeddings compute them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

#: Frequencies that do not depend on how long the sequence has become.
STATIC_KINDS = ("default", "linear", "llama3", "yarn")


def is_static(config: Any) -> bool:
    """Can all positions be computed ahead? `config` is transformers' configuration of the model."""
    rope = config.rope_parameters
    return rope.get("rope_type", "default") in STATIC_KINDS and rope.get("partial_rotary_factor", 1.0) == 1.0


def rope_tables(config: Any, count: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions, dim / 2) float32 each, for `count` positions; the rotation's second half has the same ones."""
    frequencies, scaling = _frequencies(config, dim)
    angles = torch.arange(count)[:, None].float() * frequencies.float()
    return (angles.cos() * scaling).numpy(), (angles.sin() * scaling).numpy()


def _frequencies(config: Any, dim: int) -> tuple[torch.Tensor, float]:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0
    # Here, as it brings the rest of transformers along (plain_config.py).
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    return frequencies, float(scaling)
