"""How big the KV pool is when no argument says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints
from trtllm_disagg.engines.embedded.kv_cache.pool import num_kv_blocks
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.model_shape import ModelShape, read_shape
from trtllm_disagg.errors import ConfigError


@pytest.fixture
def shape(checkpoints: Checkpoints) -> ModelShape:
    return read_shape(checkpoints("llama"), "auto")


def blocks(shape: ModelShape, max_seq_len: int | None = None, *, device: str = "cpu", **kv: Any) -> int:
    kv = {"tokens_per_block": 16} | kv
    args = LlmArgs(model=Path("unread"), max_seq_len=max_seq_len, kv_cache_config=kv)  # type: ignore[arg-type]
    return num_kv_blocks(args, shape, torch.device(device))


def test_max_tokens_sets_the_pool_size(shape: ModelShape) -> None:
    assert blocks(shape, max_tokens=1000) == 62


def test_a_small_model_takes_no_more_than_32_sequences_need(shape: ModelShape) -> None:
    assert blocks(shape, max_seq_len=512) == 32 * 512 // 16


def test_little_memory_makes_a_small_pool(shape: ModelShape) -> None:
    # A token of this model takes 2 KiB, so this is room for a few thousand of them on any machine.
    assert 0 < blocks(shape, free_gpu_memory_fraction=1e-4) < 32 * shape.config.max_position_embeddings // 16


def test_a_pool_without_a_block_is_refused(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens: 15 is not allowed; .* 16"):
        blocks(shape, max_tokens=15)
    with pytest.raises(ConfigError, match="free_gpu_memory_fraction: 1e-12 is not allowed; expected more"):
        blocks(shape, free_gpu_memory_fraction=1e-12)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_stated_size_that_the_machine_has_no_memory_for_is_refused(
    device: str, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is allocated: a zero too many would take the memory of other processes on the machine."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 34, 1 << 34))
    with pytest.raises(ConfigError, match=r"max_tokens: 1000000000000 is not allowed; .* \d+"):
        blocks(shape, device=device, max_tokens=10**12)


def test_on_cuda_it_is_a_share_of_the_memory_of_the_device(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_bytes = (
        2 * shape.config.num_hidden_layers * shape.config.num_key_value_heads * shape.config.head_dim * 4
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4096 * token_bytes, 1 << 40))
    assert blocks(shape, device="cuda", free_gpu_memory_fraction=0.5) == 2048 // 16
