"""Which publishers a worker runs."""

from __future__ import annotations

from typing import Any

from dynamo.llm import KvEventPublisher, WorkerMetricsPublisher

from trtllm_disagg.config import WorkerConfig
from trtllm_disagg.handlers.policy import Policy
from trtllm_disagg.publisher.base import NullPublisher, Publisher
from trtllm_disagg.publisher.kv_events import EventSink, KvEventForwarder
from trtllm_disagg.publisher.load import StatsForwarder
from trtllm_disagg.publisher.metrics import EngineMetrics, expose


async def create_publishers(
    config: WorkerConfig, endpoint: Any, llm: Any, block_size: int, policy: Policy
) -> list[Publisher]:
    """One for cache events and one for statistics; null ones where the flags say so."""
    sinks: list[EventSink] = []
    if config.tells_kv_events:
        sinks.append(KvEventPublisher(endpoint, kv_block_size=block_size, enable_local_indexer=True))
    if config.reads_kv_events:
        sinks.append(policy.cached)
    events: Publisher = (
        KvEventForwarder(llm, sinks, block_size, on_gap=policy.cached.clear) if sinks else NullPublisher()
    )
    stats: Publisher = NullPublisher()
    if config.publish_metrics:
        load, metrics = WorkerMetricsPublisher(), EngineMetrics(policy.counts)
        await load.create_endpoint(endpoint)
        expose(metrics, endpoint, config)
        stats = StatsForwarder(llm, load, metrics)
    return [events, stats]
