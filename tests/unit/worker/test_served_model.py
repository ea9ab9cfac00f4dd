"""What a worker says of its engine's KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.recording_pair import recording_engine
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.worker.worker import served_model


@pytest.mark.parametrize(
    ("capacity", "block_size", "num_blocks"),
    [({"tokensPerBlock": 64, "maxNumBlocks": 9, "maxNumTokens": 576}, 64, 9), ({}, 128, 0)],
    ids=["reported", "not-reported"],
)
def test_block_size_without_a_reported_capacity_is_that_of_the_engines_arguments(
    capacity: dict[str, Any], block_size: int, num_blocks: int
) -> None:
    """TensorRT-LLM sets it for some models, if nothing else does."""
    engine = recording_engine()
    engine.llm.args.kv_cache_config.tokens_per_block = 128
    engine.llm.get_kv_cache_capacity = lambda: capacity
    model = served_model(WorkerConfig(model="org/model", kv_block_size=16), engine)
    assert (model.block_size, model.num_blocks) == (block_size, num_blocks)
