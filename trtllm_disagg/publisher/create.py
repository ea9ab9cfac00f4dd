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
    config: WorkerConfig, endpoint: Any, peer_endpoint: Any, llm: Any, block_size: int, policy: Policy
) -> list[Publisher]:
    """One for cache events and one for statistics; null ones where the flags say so. `endpoint` is where frontends find
    this worker, `peer_endpoint` where workers do.
    """
    sinks: list[EventSink] = []
    listened_at = [(endpoint, config.publish_kv_events), (peer_endpoint, config.tells_peers)]
    for each in (each for each, is_listened_at in listened_at if is_listened_at):
        sinks.append(KvEventPublisher(each, kv_block_size=block_size, enable_local_indexer=True))
    if config.reads_kv_events:
        sinks.append(policy.cached)
    events: Publisher = (
        KvEventForwarder(llm, sinks, block_size, on_gap=policy.cached.clear) if sinks else NullPublisher()
    )
    stats: Publisher = NullPublisher()
    if config.publish_metrics:
        load, metrics = WorkerMetricsPublisher(), EngineMetrics(policy.counts, policy.queued)
        await load.create_endpoint(endpoint)
        expose(metrics, endpoint, config)
        stats = StatsForwarder(llm, load, metrics)
    return [events, stats]
