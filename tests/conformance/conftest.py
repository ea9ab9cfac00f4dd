"""Two LLMs for the whole suite: loading is what takes time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.api import (
    IS_EMBEDDED,
    IS_MODELLED,
    MAX_BATCH_SIZE,
    MAX_SEQ_LEN,
    MODEL,
    TOKENS_PER_BLOCK,
    find,
)
from tests.conftest import Checkpoints
from tests.support.modelled_cores import MEASURED

MakeLlm = Callable[..., Any]


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> Path:
    if MODEL is not None:
        return Path(MODEL)
    if not IS_EMBEDDED:
        pytest.skip("TRTLLM_DISAGG_CONFORMANCE_MODEL names no model directory")
    checkpoints: Checkpoints = request.getfixturevalue("checkpoints")
    return checkpoints()


@pytest.fixture(scope="session")
def make_llm(model: Path) -> MakeLlm:
    def make(**more: Any) -> Any:
        settings: dict[str, Any] = {
            "kv_cache_config": find("KvCacheConfig")(
                max_tokens=4096,
                tokens_per_block=TOKENS_PER_BLOCK,
                free_gpu_memory_fraction=0.2,
                event_buffer_max_size=4096,
                # Integers, which is what Dynamo's router reads.
                kv_cache_event_hash_algo="v1_block_key",
            ),
            "cache_transceiver_config": find("CacheTransceiverConfig")(backend="DEFAULT"),
            "guided_decoding_backend": "llguidance",
            "enable_iter_perf_stats": True,
            # TensorRT-LLM's context servers need it.
            "disable_overlap_scheduler": True,
            "max_batch_size": MAX_BATCH_SIZE,
            "max_num_tokens": 1024,
            "max_seq_len": MAX_SEQ_LEN,
        }
        if IS_MODELLED:
            settings |= {"guided_decoding_backend": None, "modelled": {"measured": MEASURED}}
        return find("LLM")(str(model), **(settings | more))

    return make


@pytest.fixture(scope="session")
def llms(make_llm: MakeLlm) -> Iterator[tuple[Any, Any]]:
    """For prefill, which also serves whole requests, and for decode. They load side by side."""
    with ThreadPoolExecutor(2) as pool:
        # One GPU may have to hold both, and TensorRT-LLM measures what is free.
        pair = tuple(pool.map(lambda _: make_llm(), range(2))) if IS_EMBEDDED else (make_llm(), make_llm())
    yield pair[0], pair[1]
    for llm in pair:
        llm.shutdown()


@pytest.fixture
def llm(llms: tuple[Any, Any]) -> Any:
    return llms[0]


@pytest.fixture
def decode_llm(llms: tuple[Any, Any]) -> Any:
    return llms[1]
