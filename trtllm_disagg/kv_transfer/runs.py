"""Neighbouring blocks move as one piece."""

from __future__ import annotations

import numpy as np


def runs_of(blocks: np.ndarray) -> list[slice]:
    """Stretches of block ids that grow by one, in order, as slices of a pool."""
    if not len(blocks):
        return []
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(blocks)]))
    firsts = blocks[starts]
    return [
        slice(int(first), int(first) + int(length))
        for first, length in zip(firsts, ends - starts, strict=True)
    ]
