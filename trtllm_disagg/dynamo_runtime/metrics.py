"""The engine's metrics and the worker's load, and the worker's /metrics page."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo.common.utils.prometheus import LLMBackendMetrics, register_engine_metrics_callback
from dynamo.prometheus_names import kvstats, labels, name_prefix
from dynamo.prometheus_names import trtllm_additional as names
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtllm_disagg.config.settings import COMPONENTS, parse_endpoint_id
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.engine.handoffs_held import HandoffsHeld
from trtllm_disagg.engine.trtllm_version import step_gauges
from trtllm_disagg.handlers.admission import Queued
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.trace import RequestEnd

PREFIX = "trtllm_disagg_"
OTHER = "other"

#: Prometheus appends `_total` to each.
_COUNTERS = {
    "prefill_tokens": "Prompt tokens computed",
    "decode_tokens": "Tokens generated after the first of each answer",
    "kv_pulls": "Requests with KV read from another worker",
    "kv_bytes_pulled": "KV bytes read",
    "kv_bytes_saved": "KV bytes not read because they were cached here",
    "kv_pushes": "Requests with KV written into another worker (generation_first)",
    "kv_bytes_pushed": "KV bytes written",
    "modelled_steps": "Steps of the modelled engine",
    "modelled_step_seconds": "Step time on the GPU, in modelled seconds",
    "modelled_late_seconds": "Delay of steps on this machine, in modelled seconds",
}
_GAUGES = {
    "kv_blocks_used": "KV blocks of running requests and held handoffs",
    "requests_active": "Requests running or waiting in the engine",
}
#: Running totals of the embedded engine. TensorRT-LLM does not report them; then only token metrics remain, counted by
#: steps.
_TOTALS = {
    "decode_tokens": "decodeTokens",
    "kv_pulls": "kvPulls",
    "kv_bytes_pulled": "kvBytesPulled",
    "kv_bytes_saved": "kvBytesSaved",
    "kv_pushes": "kvPushes",
    "kv_bytes_pushed": "kvBytesPushed",
}

#: The buckets of Dynamo's worker, so that both histograms add up.
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BYTES = tuple(step * 10**power for power in range(5, 10) for step in (1, 5))
_GIGABYTES_A_SECOND = (0.1, 0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_EVENTS = tuple(2**power for power in range(18))

#: The names queried by Dynamo's dashboard for disaggregated serving; Dynamo 1.6 names two differently.
_OF_DASHBOARD = {
    "active_blocks": "KV blocks of running requests",
    kvstats.TOTAL_BLOCKS: "KV blocks of the pool",
    kvstats.GPU_CACHE_USAGE_PERCENT: "Used share of the pool (0 to 1)",
}


@dataclass(frozen=True, slots=True)
class Labelled:
    """Makes metrics with the same label values."""

    labels: Mapping[str, str]
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, [*self.labels], registry=self.registry).labels(**self.labels)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, [*self.labels], registry=self.registry).labels(**self.labels)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, text, [*self.labels], registry=self.registry, buckets=buckets)
        return made.labels(**self.labels)


class DynamoMetrics:
    """Metrics under the names of Dynamo's worker, from engine statistics, ended requests and cache events."""

    def __init__(self, config: WorkerConfig, num_blocks: int, num_ranks: int = 1) -> None:
        """`num_blocks`: of each rank's KV pool; 0: unknown until the first step. Every series exists from the start, so
        that rates are right from the first event.
        """
        self.registry = CollectorRegistry()
        component = COMPONENTS[config.role]
        self._gauges = LLMBackendMetrics(self.registry, config.model_name, component)
        every_rank = [labels.MODEL, labels.COMPONENT, labels.DP_RANK]
        self._shown = {
            name: Gauge(f"{name_prefix.COMPONENT}_kvstats_{name}", text, every_rank, registry=self.registry)
            for name, text in _OF_DASHBOARD.items()
        }
        self._where = {labels.MODEL: config.model_name, labels.COMPONENT: component}
        #: Rank -> the blocks of its pool.
        self._totals: dict[str, int] = {}
        self._reports_all = False
        for rank in range(num_ranks):
            self._show_used(str(rank), 0, num_blocks)

        mode = {
            "model_name": config.model_name,
            "disaggregation_mode": config.role.value,
            "engine_type": "trtllm",
        }
        ours = Labelled(mode, self.registry)
        self._aborted = ours.counter(names.NUM_ABORTED_REQUESTS_TOTAL, "Requests cancelled by their client")
        guided = "Requests with guided decoding"
        self._guided = ours.counter(names.REQUEST_TYPE_STRUCTURED_OUTPUT_TOTAL, guided)
        transfers = "Requests with KV from another worker"
        self._transfers = ours.counter(names.KV_TRANSFER_SUCCESS_TOTAL, transfers)
        latency, speed = names.KV_TRANSFER_LATENCY_SECONDS, names.KV_TRANSFER_SPEED_GB_S
        self._seconds = ours.histogram(latency, "Seconds per transfer", _SECONDS)
        self._bytes = ours.histogram(names.KV_TRANSFER_BYTES, "Bytes per transfer", _BYTES)
        self._speed = ours.histogram(speed, "GB/s per transfer", _GIGABYTES_A_SECOND)
        buffer = "Size of the engine's buffer of cache events"
        self.event_buffer = ours.gauge(names.KV_EVENT_BUFFER_CAPACITY, buffer)
        self.polled_events = ours.histogram(names.KV_EVENT_DRAIN_BATCH_SIZE, "Cache events per poll", _EVENTS)
        lost = "Cache events that the engine dropped"
        self.lost_events = ours.counter(names.KV_EVENT_ID_GAP_EVENTS_TOTAL, lost)

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`."""
        self._reports_all = _reports_all(stat)
        blocks = stat.get("kvCacheStats") or {}
        rank = str(stat.get("attentionDpRank") or 0)
        used, total = blocks.get("usedNumBlocks"), blocks.get("maxNumBlocks")
        if used is not None and total:
            self._show_used(rank, used, total)
        if (hit_rate := blocks.get("cacheHitRate")) is not None:
            self._gauges.set_kv_cache_hit_rate(rank, hit_rate)

    def show_idle(self) -> None:
        """The engine takes no steps (`StatsForwarder`); the blocks in TensorRT-LLM's last record are free now."""
        if not self._reports_all:
            for rank, total in self._totals.items():
                self._show_used(rank, 0, total)

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

    def _show_used(self, rank: str, used: int, total: int) -> None:
        share = used / total if total else 0.0
        self._totals[rank] = total
        self._gauges.set_total_blocks(rank, total)
        self._gauges.set_gpu_cache_usage(rank, share)
        shown = {"active_blocks": used, kvstats.TOTAL_BLOCKS: total, kvstats.GPU_CACHE_USAGE_PERCENT: share}
        for name, value in shown.items():
            self._shown[name].labels(**self._where, **{labels.DP_RANK: rank}).set(value)


class LabelValues:
    """Bounds one label's values, since a series is kept for ever: `known`, others up to `max_values`, then `other`."""

    def __init__(self, *known: str, max_values: int = 24) -> None:
        self._values = set(known)
        self._max_values = max_values

    def bound(self, value: str) -> str:
        if value in self._values:
            return value
        if len(self._values) >= self._max_values or not value.isidentifier() or len(value) > 64:
            return OTHER
        self._values.add(value)
        return value


class StepMetrics(Collector):
    """The gauges of TensorRT-LLM's server after the engine's last step; with attention DP, of the last rank's."""

    def __init__(self, model_name: str) -> None:
        self._mode = {"model_name": model_name, "engine_type": "trtllm"}
        self._values: dict[str, float] = {}

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`."""
        self._values = self._values | step_gauges(stat)

    def show_idle(self) -> None:
        """The engine takes no steps, so nothing runs, unlike in TensorRT-LLM's last record."""
        self._values = self._values | {name: 0 for name in self._values if name.startswith("num_")}

    def collect(self) -> Iterator[Metric]:
        for name, value in self._values.items():
            gauge = GaugeMetricFamily(f"trtllm_{name}", "Last step", labels=list(self._mode))
            gauge.add_metric(list(self._mode.values()), value)
            yield gauge


class EngineMetrics(Collector):
    """Adds up the engine's per-iteration statistics, which each attention-DP rank sends."""

    def __init__(self, handoffs: HandoffsHeld, clock: Callable[[], float] = time.monotonic) -> None:
        """`handoffs`: for engines that do not count them. `clock`: of the engine's statistics."""
        self._handoffs, self._clock = handoffs, clock
        self._counted = defaultdict[str, float](float)
        self._held: dict[str, dict[Any, float]] = {}
        #: Rank -> number of held handoffs, and when the oldest was made.
        self._made: dict[Any, tuple[int, float | None]] = {}

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`."""
        batch = stat.get("inflightBatchingStats") or {}
        self._counted["prefill_tokens"] += batch.get("numCtxTokens", 0)
        self._counted["decode_tokens"] += _num_generated(stat)
        if batch.get("numScheduledRequests") and (modelled := stat.get("modelled")):
            self._counted["modelled_steps"] += 1
            self._counted["modelled_step_seconds"] += modelled["stepMS"] / 1000
            self._counted["modelled_late_seconds"] += modelled["lateMS"] / 1000
        totals = stat.get("totals") or {}
        self._counted |= {name: totals[key] for name, key in _TOTALS.items() if key in totals}
        rank = stat.get("attentionDpRank")
        self._hold("kv_blocks_used", rank, (stat.get("kvCacheStats") or {}).get("usedNumBlocks"))
        active = stat.get("numActiveRequests", 0) + stat.get("numQueuedRequests", 0)
        self._hold("requests_active", rank, active)
        if _reports_all(stat):
            self._made[rank] = stat["numHandoffsHeld"], stat.get("oldestHandoffAt")

    def show_idle(self) -> None:
        """As `DynamoMetrics.show_idle`."""
        if not self._made:
            self._held = {name: dict.fromkeys(by_rank, 0) for name, by_rank in self._held.items()}

    def collect(self) -> Iterator[Metric]:
        # Dynamo calls this from another thread, so copy dicts that may grow.
        for name, value in list(self._counted.items()):
            yield CounterMetricFamily(PREFIX + name, _COUNTERS[name], value=value)
        for name, by_rank in list(self._held.items()):
            yield _gauge(name, _GAUGES[name], sum(list(by_rank.values())))
        num_held, oldest_seconds = self._handoffs_held()
        yield _gauge("handoffs_held", "Finished prefills with KV waiting for a decode worker", num_held)
        yield _gauge("handoffs_oldest_seconds", "Age of the oldest held handoff", oldest_seconds)

    def _handoffs_held(self) -> tuple[int, float]:
        made = list(self._made.values())
        if not made:
            return self._handoffs.count(), self._handoffs.oldest_seconds()
        since = [at for _, at in made if at is not None]
        return sum(count for count, _ in made), max(0.0, self._clock() - min(since)) if since else 0.0

    def _hold(self, name: str, rank: Any, value: float | None) -> None:
        if value is not None:
            self._held.setdefault(name, {})[rank] = value


class LoadMetrics(Collector):
    """This worker's waiting and refused requests, and skipped peers."""

    def __init__(self, queued: Queued, breaker: CircuitBreaker) -> None:
        self._queued, self._breaker = queued, breaker

    def collect(self) -> Iterator[Metric]:
        queued = self._queued
        shed = "Requests refused because too many were waiting"
        yield CounterMetricFamily(PREFIX + "requests_shed", shed, value=queued.num_refused)
        yield _gauge("queued_requests", "Accepted requests without a first token", queued.requests)
        yield _gauge("queued_tokens", "Prompt tokens of queued requests", queued.tokens)
        yield _gauge("breakers_open", "Peers skipped now after failures in a row", len(self._breaker.open()))
        opened = "Times that a peer was skipped, or skipped for longer"
        yield CounterMetricFamily(PREFIX + "breakers_opened", opened, value=self._breaker.times_opened)


def _reports_all(stat: Mapping[str, Any]) -> bool:
    """Whether records show all changes, as the embedded engine's do, which count handoffs and changes between steps."""
    return "numHandoffsHeld" in stat


def _num_generated(stat: Mapping[str, Any]) -> float:
    """One token per request in the decode step, plus accepted draft tokens."""
    steps: int = (stat.get("inflightBatchingStats") or {}).get("numGenRequests", 0)
    drafts = stat.get("specDecodingStats") or {}
    accepted: int = drafts.get("numAcceptedTokens", 0)
    if stat.get("attentionDpRank"):
        # TensorRT-LLM repeats rank 0's draft statistics for all ranks.
        drafting: int = drafts.get("numRequestsWithDraftTokens", 0)
        return steps * (1 + accepted / max(drafting, 1))
    return steps + accepted


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def registry_of(*collectors: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def expose(registry: CollectorRegistry, endpoint: Any, config: WorkerConfig) -> None:
    """Show a registry on the DYN_SYSTEM_PORT page, with Dynamo's labels and the role's component."""
    # prometheus_client would add a useless `_created` series to each.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    here = parse_endpoint_id(config.endpoint_id)
    register_engine_metrics_callback(
        endpoint,
        registry,
        namespace_name=here.namespace,
        component_name=COMPONENTS[config.role],
        endpoint_name=here.endpoint,
        model_name=config.model_name,
    )


class QueueMetrics(Collector):
    """The prefill queue's length and age, equal on all its workers."""

    def __init__(self, depth: Callable[[], int], age: Callable[[], float]) -> None:
        self._depth, self._age = depth, age

    def collect(self) -> Iterator[Metric]:
        yield _gauge("prefill_queue_depth", "Prefills waiting in the queue", self._depth())
        yield _gauge("prefill_queue_age_seconds", "Age of the oldest waiting prefill", self._age())
