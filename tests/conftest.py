"""Tiny checkpoints, written once for all tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import write_checkpoint

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """checkpoints("llama") -> its directory."""
    import torch

    # As the engine's own process runs; sums are split the same way everywhere.
    torch.set_num_threads(1)

    @functools.cache
    def checkpoint(family: str = "llama", seed: int = 0) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp(f"{family}-{seed}"), family, seed=seed)

    return checkpoint
