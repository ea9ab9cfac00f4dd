"""A model cut into parts, by the names of its layers. The ranks are threads here; with MPI: test_tensor_parallel.py."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trtllm_disagg.engines.embedded.model.layer_ops import LayerOps
from trtllm_disagg.engines.embedded.model.pack import TiledLinear, pack_experts
from trtllm_disagg.engines.embedded.tensor_parallel.group import RankGroup
from trtllm_disagg.engines.embedded.tensor_parallel.team import shard_model
from trtllm_disagg.errors import ConfigError


class ThreadCommunicator:
    """The part of mpi4py's communicator that RankGroup uses, among threads of this process."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self._board, self._barrier = board, barrier

    def Allgather(self, mine: np.ndarray, every: np.ndarray) -> None:
        for rank, part in enumerate(self._exchange(mine)):
            every.reshape(self.size, -1)[rank] = part

    def Gatherv(self, mine: np.ndarray, every: Any, root: int) -> None:
        parts = self._exchange(mine)
        if self.rank == root:
            buffer, sizes, starts, _ = every
            for part, size, start in zip(parts, sizes, starts, strict=True):
                buffer[start : start + size] = part

    def _exchange(self, mine: np.ndarray) -> list[np.ndarray]:
        self._board[self.rank] = mine.copy()
        self._barrier.wait()
        parts = list(self._board)
        self._barrier.wait()
        return parts


def on_ranks(size: int, work: Callable[[RankGroup], Any]) -> list[Any]:
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=10)
    groups = [RankGroup(ThreadCommunicator(rank, board, barrier)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, groups))


@torch.inference_mode()
def run_sharded(model: nn.Module, group: RankGroup, run: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
    mine = copy.deepcopy(model)
    shard_model(mine, group)
    pack_experts(mine, TiledLinear, LayerOps())
    return run(mine)


def model_of(**settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        **settings,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("size", [2, 4])
def test_any_model_of_known_layer_names_can_be_cut(size: int) -> None:
    """Dense and expert layers, an odd vocabulary."""
    model = model_of(mlp_only_layers=[0])
    tokens = torch.arange(3, 12)[None]

    def logits(of: nn.Module) -> torch.Tensor:
        answer: torch.Tensor = of(input_ids=tokens, use_cache=False).logits
        return answer

    with torch.inference_mode():
        expected = logits(model)
    first, *others = on_ranks(size, lambda group: run_sharded(model, group, logits))
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    assert sum(part.shape[-1] for part in others) == 101 - 101 // size, "each has its part of the vocabulary"


def test_sharded_layers_hold_only_their_share_of_bytes() -> None:
    model = model_of()

    def bytes_of(group: RankGroup) -> int:
        mine = copy.deepcopy(model)
        shard_model(mine, group)
        layers = mine.model.layers.parameters()
        return sum(weight.untyped_storage().nbytes() for weight in layers)

    whole = sum(weight.untyped_storage().nbytes() for weight in model.model.layers.parameters())
    for part in on_ranks(2, bytes_of):
        assert part < 0.52 * whole  # norms and routers are on every rank


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"qkv_proj": nn.Linear(8, 24)}, "no rule says how to divide block.qkv_proj"),
        ({"experts": nn.Linear(8, 8)}, "no rule says how to divide block.experts"),
    ],
)
def test_a_layer_of_another_name_is_refused(layer: dict[str, nn.Module], message: str) -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict(layer)})
    with pytest.raises(ConfigError, match=message):
        on_ranks(1, lambda group: shard_model(model, group))


def test_experts_of_another_shape_are_refused() -> None:
    experts: Any = nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 32))
    experts.down_proj = nn.Parameter(torch.zeros(2, 16, 8))
    with pytest.raises(ConfigError, match="its experts have another shape"):
        on_ranks(1, lambda group: shard_model(nn.ModuleDict({"experts": experts}), group))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_of_a_step_are_gathered_however_many_there_are(rows: int) -> None:
    """None at all after the last layer of a step that samples nothing."""

    def gathered(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.full((rows, 3), float(group.rank))
        width = group.part(5).stop - group.part(5).start
        return group.gather_columns(mine), group.collect_columns(torch.ones(rows, width), 5)

    results = on_ranks(2, gathered)
    assert [every.shape for every, _ in results] == [(rows, 6)] * 2
    assert results[0][1].shape == (rows, 5)
