"""Everything here needs CUDA, and is skipped with that reason where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core

HERE = Path(__file__).parent
MakeCore = Callable[..., Core]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.fixture(autouse=True)
def _whole_float32() -> Iterator[None]:
    """No TF32: its products have 10 bits of mantissa, and greedy tokens would differ."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def make_core(checkpoints: Checkpoints) -> Iterator[MakeCore]:
    """make_core("llama", max_num_tokens=64, ...) -> an engine on CUDA."""
    made: list[Core] = []

    def make(family: str = "llama", **args: Any) -> Core:
        core = Core(checkpoints(family), embedded={"device": "cuda"}, **args)
        model: Any = core.engine.model
        assert model.runner.pool.kv.is_cuda
        made.append(core)
        return core

    yield make
    for core in made:
        core.assert_idle()
        core.close()
