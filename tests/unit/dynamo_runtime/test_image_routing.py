"""Dynamo's KV router finds an image's published blocks by what the frontend adds to a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dynamo.common.multimodal.routing_utils import pad_value_for_mm_hash
from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

from tests.support.handling import request
from tests.support.models import write_tokenizer
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.discovery import KvOverlaps
from trtllm_disagg.dynamo_runtime.metrics import DynamoMetrics
from trtllm_disagg.dynamo_runtime.publishers import KvEventForwarder, image_token_id
from trtllm_disagg.engine.cache_events import CacheEvents
from trtllm_disagg.tools.up.plan import LOOPBACK

BLOCK, IMAGE = 4, 90
CAT, DOG = "7d7a271ab6ff5d96", "fedcba9876543210"
#: Of a model family that Dynamo's frontend can expand.
CONFIG = {"model_type": "qwen2_vl", "image_token_id": IMAGE, "vision_token_id": 91}


def stored(tokens: list[int], image: str) -> dict[str, Any]:
    """The event of a prompt whose first block is text."""
    keys = [{"type": "mm_key", "hash": image, "start_offset": 0}]
    blocks = [
        {
            "block_hash": at + 1,
            "tokens": [{"token_id": token} for token in tokens[at : at + BLOCK]],
            "mm_keys": keys if at else [],
        }
        for at in range(0, len(tokens), BLOCK)
    ]
    return {"data": {"type": "stored", "parent_hash": None, "blocks": blocks}}


def expanded(image: str) -> dict[str, Any]:
    """What the frontend adds to a body, padded to a block."""
    pads = [pad_value_for_mm_hash(int(image, 16))] * 5
    return {"mm_routing_info": {"routing_token_ids": [1, 2, 3, 4, 5, *pads, 6, 7, 8, 0, 0, 0]}}


async def unasked(body: Any, context: Any) -> AsyncIterator[Any]:
    yield body


async def test_prompt_with_the_published_image_is_found_and_with_another_only_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 64}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "discovery"))
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", LOOPBACK)
    config, card = WorkerConfig(model=str(tmp_path), enable_multimodal=True), ModelRuntimeConfig()
    card.enable_local_indexer = card.kv_event_publishing_enabled = True
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    try:
        endpoint = runtime.endpoint("images.prefill.generate")
        serving = asyncio.ensure_future(endpoint.serve_endpoint(unasked))
        put = partial(register_model, ModelInput.Tokens, ModelType.Empty, endpoint, config.model, "m")
        types = {"worker_type": WorkerType.Prefill, "needs": [[WorkerType.Aggregated]]}
        await put(**types, kv_cache_block_size=BLOCK, runtime_config=card)
        publisher = partial(KvEventPublisher, endpoint, kv_block_size=BLOCK, enable_local_indexer=True)
        source = partial(publisher, image_token_id=image_token_id(config))
        events = CacheEvents(1, BLOCK, 0)
        await KvEventForwarder(events, {0: [source]}, DynamoMetrics(config, 100)).start()
        events.receive([stored([1, 2, 3, 4, 5, *[IMAGE] * 5, 6, 7], CAT)])
        overlaps = KvOverlaps(endpoint, BLOCK)

        async def found(**keys: Any) -> list[int]:
            asked = request(token_ids=[1, 2, 3, 4, 5, IMAGE, 6, 7, 8], **keys)
            return [*(await overlaps(asked)).values()]

        async with asyncio.timeout(20):
            while await found(**expanded(CAT)) != [12]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await found(**expanded(DOG)), await found()) == ([4], [4])
    finally:
        runtime.shutdown()
    await serving
