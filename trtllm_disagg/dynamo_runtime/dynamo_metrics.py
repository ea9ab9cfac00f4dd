"""The numbers of Dynamo's own TensorRT-LLM worker, under their names: the panels for KV and transfers of the dashboards
that Dynamo ships show these workers, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.common.utils.prometheus import LLMBackendMetrics
from dynamo.prometheus_names import kvstats, labels, name_prefix
from dynamo.prometheus_names import trtllm_additional as names
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trtllm_disagg.config.settings import COMPONENTS
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.handlers.trace import RequestEnd

#: As Dynamo's worker has them, so that the histograms of both add up.
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BYTES = tuple(step * 10**power for power in range(5, 10) for step in (1, 5))
_GIGABYTES_A_SECOND = (0.1, 0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_EVENTS = tuple(2**power for power in range(18))

#: As Dynamo's dashboard for disaggregated serving asks for them; Dynamo 1.6 has two of them under other names.
_OF_DASHBOARD = {
    "active_blocks": "KV blocks that running requests use",
    kvstats.TOTAL_BLOCKS: "KV blocks of the pool",
    kvstats.GPU_CACHE_USAGE_PERCENT: "The share of them that running requests use (0 to 1)",
}


class DynamoMetrics:
    """Hears of the engine's statistics, of requests that end, and of cache events."""

    def __init__(self, config: WorkerConfig, num_blocks: int, num_ranks: int = 1) -> None:
        """`num_blocks` of each rank's KV pool; 0: not known before the first step. Every series is there from the
        start, so that its rate is known.
        """
        self.registry = CollectorRegistry()
        component = COMPONENTS[config.role]
        self._gauges = LLMBackendMetrics(self.registry, config.model_name, component)
        every_rank = [labels.MODEL, labels.COMPONENT, labels.DP_RANK]
        self._shown = [
            Gauge(f"{name_prefix.COMPONENT}_kvstats_{name}", text, every_rank, registry=self.registry)
            for name, text in _OF_DASHBOARD.items()
        ]
        self._where = {labels.MODEL: config.model_name, labels.COMPONENT: component}
        for rank in range(num_ranks):
            self._show_used(str(rank), 0, num_blocks)

        mode = {
            "model_name": config.model_name,
            "disaggregation_mode": config.role.value,
            "engine_type": "trtllm",
        }

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, list(mode), registry=self.registry).labels(**mode)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, list(mode), registry=self.registry, buckets=buckets).labels(**mode)

        self._aborted = counter(names.NUM_ABORTED_REQUESTS_TOTAL, "Requests that their client left")
        self._guided = counter(names.REQUEST_TYPE_STRUCTURED_OUTPUT_TOTAL, "Requests with guided decoding")
        self._transfers = counter(
            names.KV_TRANSFER_SUCCESS_TOTAL, "Requests with KV that came to this worker"
        )
        self._seconds = histogram(names.KV_TRANSFER_LATENCY_SECONDS, "Seconds of one transfer", _SECONDS)
        self._bytes = histogram(names.KV_TRANSFER_BYTES, "Bytes of one transfer", _BYTES)
        self._speed = histogram(names.KV_TRANSFER_SPEED_GB_S, "GB/s of one transfer", _GIGABYTES_A_SECOND)
        self._events = histogram(names.KV_EVENT_DRAIN_BATCH_SIZE, "Cache events of one poll", _EVENTS)
        self._lost = counter(names.KV_EVENT_ID_GAP_EVENTS_TOTAL, "Cache events that the engine dropped")

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`."""
        blocks = stat.get("kvCacheStats") or {}
        rank = str(stat.get("attentionDpRank") or 0)
        used, most = blocks.get("usedNumBlocks"), blocks.get("maxNumBlocks")
        if used is not None and most:
            self._show_used(rank, used, most)
        if (hit_rate := blocks.get("cacheHitRate")) is not None:
            self._gauges.set_kv_cache_hit_rate(rank, hit_rate)

    def loaded(self, seconds: float) -> None:
        self._gauges.set_model_load_time(seconds)

    def ended(self, end: RequestEnd) -> None:
        self._guided.inc(bool(end.request.sampling.guided_decoding))
        self._aborted.inc(end.is_aborted)
        if end.transfer is not None:
            seconds, num_bytes = end.transfer
            self._transfers.inc()
            self._seconds.observe(seconds)
            self._bytes.observe(num_bytes)
            if seconds > 0:
                self._speed.observe(num_bytes / seconds / 1e9)

    def polled_events(self, count: int) -> None:
        self._events.observe(count)

    def lost_events(self, count: int) -> None:
        self._lost.inc(count)

    def _show_used(self, rank: str, used: int, most: int) -> None:
        share = used / most if most else 0.0
        self._gauges.set_total_blocks(rank, most)
        self._gauges.set_gpu_cache_usage(rank, share)
        for gauge, value in zip(self._shown, (used, most, share), strict=True):
            gauge.labels(**self._where, **{labels.DP_RANK: rank}).set(value)
