"""What the engine did and holds, as numbers on the worker's own /metrics page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from dynamo.common.utils.prometheus import register_engine_metrics_callback
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from trtllm_disagg.config.settings import parse_endpoint_id
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.handlers.admission import Queued
from trtllm_disagg.handlers.trace import RequestCounts

PREFIX = "trtllm_disagg_"

#: Prometheus adds `_total` to each of these.
_COUNTERS = {
    "prefill_tokens": "Prompt tokens that went through the model on this worker",
    "decode_tokens": "Tokens that this worker generated behind the first one of an answer",
    "kv_pulls": "Requests for which this worker read KV from another one",
    "kv_bytes_pulled": "Bytes of KV that came to this worker",
    "kv_bytes_saved": "Bytes of KV that did not have to come, because this worker had them",
    "kv_pushes": "Requests for which this worker wrote KV into another one (generation_first)",
    "kv_bytes_pushed": "Bytes of KV that this worker wrote into another one",
    "modelled_steps": "Steps of the modelled engine",
    "modelled_step_seconds": "What those steps take on the GPU, in modelled seconds",
    "modelled_late_seconds": "How late this machine was at the end of each of those steps, in modelled seconds",
}
_SHED = "Requests that were refused because too many waited on this worker"
_QUEUED = {
    "requests": "Requests that this worker has taken on and that have no first token yet",
    "tokens": "Prompt tokens of those requests",
}
_REQUESTS = "Whole requests that ended on this worker: what ran, why, and the last step down the ladder"
_TRANSFERS = {
    "seconds": "How long the KV of one request was on its way to this worker",
    "bytes": "How much KV came for one request",
}
_GAUGES = {
    "handoffs_held": "Finished prefills with KV that waits here for a decode worker",
    "kv_blocks_used": "KV blocks that running requests and held handoffs use",
    "requests_active": "Requests that run or wait in the engine",
}
#: The embedded engine's own running totals. TensorRT-LLM has no such numbers; then there is no such metric.
_TOTALS = {
    "kv_pulls": "kvPulls",
    "kv_bytes_pulled": "kvBytesPulled",
    "kv_bytes_saved": "kvBytesSaved",
    "kv_pushes": "kvPushes",
    "kv_bytes_pushed": "kvBytesPushed",
}


class EngineMetrics(Collector):
    """Adds up the engine's per-iteration statistics; every rank of attention DP sends its own."""

    def __init__(self, journeys: RequestCounts | None = None, queued: Queued | None = None) -> None:
        self._journeys = journeys or RequestCounts()
        self._queued = queued or Queued()
        self._counted: dict[str, float] = {}
        self._held: dict[str, dict[Any, float]] = {}

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`."""
        batch = stat.get("inflightBatchingStats") or {}
        self._count("prefill_tokens", batch.get("numCtxTokens", 0))
        self._count("decode_tokens", batch.get("numGenRequests", 0))
        if batch.get("numScheduledRequests") and (modelled := stat.get("modelled")):
            self._count("modelled_steps", 1)
            self._count("modelled_step_seconds", modelled["stepMS"] / 1000)
            self._count("modelled_late_seconds", modelled["lateMS"] / 1000)
        totals = stat.get("totals") or {}
        self._counted |= {name: totals[key] for name, key in _TOTALS.items() if key in totals}
        rank = stat.get("attentionDpRank")
        self._hold("kv_blocks_used", rank, (stat.get("kvCacheStats") or {}).get("usedNumBlocks"))
        self._hold(
            "requests_active", rank, stat.get("numActiveRequests", 0) + stat.get("numQueuedRequests", 0)
        )
        self._hold("handoffs_held", rank, stat.get("numHandoffsHeld"))

    def collect(self) -> Iterator[Metric]:
        # Dynamo asks from a thread of its own: no dict is iterated that may grow meanwhile.
        for name, value in list(self._counted.items()):
            yield CounterMetricFamily(PREFIX + name, _COUNTERS[name], value=value)
        for name, by_rank in list(self._held.items()):
            yield GaugeMetricFamily(PREFIX + name, _GAUGES[name], value=sum(list(by_rank.values())))
        requests = CounterMetricFamily(PREFIX + "requests", _REQUESTS, labels=RequestCounts.LABELS)
        for labels, count in list(self._journeys.ended.items()):
            requests.add_metric(labels, count)
        yield requests
        yield CounterMetricFamily(PREFIX + "requests_shed", _SHED, value=self._queued.shed)
        for name, value in (("requests", self._queued.requests), ("tokens", self._queued.tokens)):
            yield GaugeMetricFamily(f"{PREFIX}queued_{name}", _QUEUED[name], value=value)
        yield from self._transfers()

    def _transfers(self) -> Iterator[Metric]:
        journeys = self._journeys
        if journeys.num_transfers:
            for name, total in (("seconds", journeys.transfer_seconds), ("bytes", journeys.transfer_bytes)):
                yield SummaryMetricFamily(
                    f"{PREFIX}kv_transfer_{name}",
                    _TRANSFERS[name],
                    count_value=journeys.num_transfers,
                    sum_value=total,
                )

    def _count(self, name: str, more: float) -> None:
        self._counted[name] = self._counted.get(name, 0) + more

    def _hold(self, name: str, rank: Any, value: float | None) -> None:
        if value is not None:
            self._held.setdefault(name, {})[rank] = value


def expose(metrics: Collector, endpoint: Any, config: WorkerConfig) -> None:
    """On the page that DYN_SYSTEM_PORT opens, with the labels that Dynamo's own metrics have."""
    registry = CollectorRegistry()
    registry.register(metrics)
    here = parse_endpoint_id(config.endpoint_id)
    register_engine_metrics_callback(
        endpoint,
        registry,
        metric_prefix_filters=[PREFIX],
        namespace_name=here.namespace,
        component_name=here.component,
        endpoint_name=here.endpoint,
        model_name=config.model_name,
    )


class QueueState(Protocol):
    def depth(self) -> int: ...

    def age(self) -> float: ...


class QueueMetrics(Collector):
    """What waits in the prefill queue, as gauges; every worker of the queue shows the same numbers."""

    def __init__(self, queue: QueueState) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            PREFIX + "prefill_queue_depth",
            "Prefills in the queue that no worker has begun",
            value=self._queue.depth(),
        )
        yield GaugeMetricFamily(
            PREFIX + "prefill_queue_age_seconds",
            "For how long the oldest of them has waited",
            value=self._queue.age(),
        )
