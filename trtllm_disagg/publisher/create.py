"""Which publishers a worker runs."""

from __future__ import annotations

from typing import Any

from dynamo.llm import KvEventPublisher, WorkerMetricsPublisher

from trtllm_disagg.config import WorkerConfig
from trtllm_disagg.publisher.base import NullPublisher, Publisher
from trtllm_disagg.publisher.kv_events import KvEventForwarder
from trtllm_disagg.publisher.load import LoadForwarder


async def create_publishers(config: WorkerConfig, endpoint: Any, llm: Any, block_size: int) -> list[Publisher]:
    """One for cache events and one for load; null ones where the flags say so."""
    events: Publisher = NullPublisher()
    if config.publish_kv_events:
        sink = KvEventPublisher(endpoint, kv_block_size=block_size, enable_local_indexer=True)
        events = KvEventForwarder(llm, sink, block_size)
    load: Publisher = NullPublisher()
    if config.publish_metrics:
        metrics = WorkerMetricsPublisher()
        await metrics.create_endpoint(endpoint)
        load = LoadForwarder(llm, metrics)
    return [events, load]
