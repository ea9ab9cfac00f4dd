"""Metrics of the engine and of the worker's load, and how all metrics get onto the worker's /metrics page."""

from __future__ import annotations

import time
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
_GAUGES = {
    "kv_blocks_used": "KV blocks that running requests and held handoffs use",
    "requests_active": "Requests that run or wait in the engine",
}
#: Running totals of the embedded engine. TensorRT-LLM does not report them; then the metrics are left out, but for the
#: tokens, which are counted by its steps.
_TOTALS = {
    "decode_tokens": "decodeTokens",
    "kv_pulls": "kvPulls",
    "kv_bytes_pulled": "kvBytesPulled",
    "kv_bytes_saved": "kvBytesSaved",
    "kv_pushes": "kvPushes",
    "kv_bytes_pushed": "kvBytesPushed",
}

#: The buckets of Dynamo's worker, so that histograms of both can be added up.
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BYTES = tuple(step * 10**power for power in range(5, 10) for step in (1, 5))
_GIGABYTES_A_SECOND = (0.1, 0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_EVENTS = tuple(2**power for power in range(18))

#: Named as Dynamo's dashboard for disaggregated serving queries them; Dynamo 1.6 names two of them otherwise.
_OF_DASHBOARD = {
    "active_blocks": "KV blocks that running requests use",
    kvstats.TOTAL_BLOCKS: "KV blocks of the pool",
    kvstats.GPU_CACHE_USAGE_PERCENT: "The share of them that running requests use (0 to 1)",
}


@dataclass(frozen=True, slots=True)
class Labelled:
    """Makes metrics that all have the same values of the same labels."""

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
        """`num_blocks`: of each rank's KV pool; 0 where unknown before the first step. Every series exists from the
        start, so that rates are right from the first event on.
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
        #: Rank -> the blocks of its pool.
        self._most: dict[str, int] = {}
        self._tells_all = False
        for rank in range(num_ranks):
            self._show_used(str(rank), 0, num_blocks)

        mode = {
            "model_name": config.model_name,
            "disaggregation_mode": config.role.value,
            "engine_type": "trtllm",
        }
        ours = Labelled(mode, self.registry)
        self._aborted = ours.counter(names.NUM_ABORTED_REQUESTS_TOTAL, "Requests that their client left")
        guided = "Requests with guided decoding"
        self._guided = ours.counter(names.REQUEST_TYPE_STRUCTURED_OUTPUT_TOTAL, guided)
        transfers = "Requests with KV that came to this worker"
        self._transfers = ours.counter(names.KV_TRANSFER_SUCCESS_TOTAL, transfers)
        latency, speed = names.KV_TRANSFER_LATENCY_SECONDS, names.KV_TRANSFER_SPEED_GB_S
        self._seconds = ours.histogram(latency, "Seconds of one transfer", _SECONDS)
        self._bytes = ours.histogram(names.KV_TRANSFER_BYTES, "Bytes of one transfer", _BYTES)
        self._speed = ours.histogram(speed, "GB/s of one transfer", _GIGABYTES_A_SECOND)
        buffer = "Cache events that the engine keeps until they are polled"
        self._buffer = ours.gauge(names.KV_EVENT_BUFFER_CAPACITY, buffer)
        self._events = ours.histogram(names.KV_EVENT_DRAIN_BATCH_SIZE, "Cache events of one poll", _EVENTS)
        self._lost = ours.counter(names.KV_EVENT_ID_GAP_EVENTS_TOTAL, "Cache events that the engine dropped")

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`."""
        self._tells_all = _tells_all(stat)
        blocks = stat.get("kvCacheStats") or {}
        rank = str(stat.get("attentionDpRank") or 0)
        used, most = blocks.get("usedNumBlocks"), blocks.get("maxNumBlocks")
        if used is not None and most:
            self._show_used(rank, used, most)
        if (hit_rate := blocks.get("cacheHitRate")) is not None:
            self._gauges.set_kv_cache_hit_rate(rank, hit_rate)

    def rest(self) -> None:
        """The engine takes no steps (`StatsForwarder`); TensorRT-LLM's last record is of blocks that are free now."""
        if not self._tells_all:
            for rank, most in self._most.items():
                self._show_used(rank, 0, most)

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

    def polls_events_of(self, buffer_size: int) -> None:
        self._buffer.set(buffer_size)

    def polled_events(self, count: int) -> None:
        self._events.observe(count)

    def lost_events(self, count: int) -> None:
        self._lost.inc(count)

    def _show_used(self, rank: str, used: int, most: int) -> None:
        share = used / most if most else 0.0
        self._most[rank] = most
        self._gauges.set_total_blocks(rank, most)
        self._gauges.set_gpu_cache_usage(rank, share)
        for gauge, value in zip(self._shown, (used, most, share), strict=True):
            gauge.labels(**self._where, **{labels.DP_RANK: rank}).set(value)


class LabelValues:
    """The values of one label: `known`, the first others up to `most`, then `other`, for a series is kept for ever."""

    def __init__(self, *known: str, most: int = 24) -> None:
        self._values = set(known)
        self._most = most

    def bound(self, value: str) -> str:
        if value in self._values:
            return value
        if len(self._values) >= self._most or not value.isidentifier() or len(value) > 64:
            return OTHER
        self._values.add(value)
        return value


class StepMetrics(Collector):
    """The gauges of TensorRT-LLM's server, as of the engine's last step; with attention DP, of the last rank's."""

    def __init__(self, model_name: str) -> None:
        self._mode = {"model_name": model_name, "engine_type": "trtllm"}
        self._values: dict[str, float] = {}

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`."""
        self._values = self._values | step_gauges(stat)

    def rest(self) -> None:
        """The engine takes no steps, so nothing runs: TensorRT-LLM's last record is of the step before."""
        self._values = self._values | {name: 0 for name in self._values if name.startswith("num_")}

    def collect(self) -> Iterator[Metric]:
        for name, value in self._values.items():
            gauge = GaugeMetricFamily(f"trtllm_{name}", "Of the engine's last step", labels=list(self._mode))
            gauge.add_metric(list(self._mode.values()), value)
            yield gauge


class EngineMetrics(Collector):
    """Adds up the engine's per-iteration statistics, which each attention-DP rank sends for itself."""

    def __init__(self, handoffs: HandoffsHeld, clock: Callable[[], float] = time.monotonic) -> None:
        """`handoffs`: for engines that do not count them. `clock`: the clock of the engine's statistics."""
        self._handoffs, self._clock = handoffs, clock
        self._counted: dict[str, float] = {}
        self._held: dict[str, dict[Any, float]] = {}
        #: Rank -> number of handoffs that it holds, and when it made the oldest one.
        self._made: dict[Any, tuple[int, float | None]] = {}

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`."""
        batch = stat.get("inflightBatchingStats") or {}
        self._count("prefill_tokens", batch.get("numCtxTokens", 0))
        self._count("decode_tokens", _num_generated(stat))
        if batch.get("numScheduledRequests") and (modelled := stat.get("modelled")):
            self._count("modelled_steps", 1)
            self._count("modelled_step_seconds", modelled["stepMS"] / 1000)
            self._count("modelled_late_seconds", modelled["lateMS"] / 1000)
        totals = stat.get("totals") or {}
        self._counted |= {name: totals[key] for name, key in _TOTALS.items() if key in totals}
        rank = stat.get("attentionDpRank")
        self._hold("kv_blocks_used", rank, (stat.get("kvCacheStats") or {}).get("usedNumBlocks"))
        active = stat.get("numActiveRequests", 0) + stat.get("numQueuedRequests", 0)
        self._hold("requests_active", rank, active)
        if _tells_all(stat):
            self._made[rank] = stat["numHandoffsHeld"], stat.get("oldestHandoffAt")

    def rest(self) -> None:
        """As `DynamoMetrics.rest`."""
        if not self._made:
            self._held = {name: dict.fromkeys(by_rank, 0) for name, by_rank in self._held.items()}

    def collect(self) -> Iterator[Metric]:
        # Dynamo calls this from another thread, so dicts that may grow meanwhile are copied first.
        for name, value in list(self._counted.items()):
            yield CounterMetricFamily(PREFIX + name, _COUNTERS[name], value=value)
        for name, by_rank in list(self._held.items()):
            yield _gauge(name, _GAUGES[name], sum(list(by_rank.values())))
        num_held, oldest_seconds = self._handoffs_held()
        waiting = "Finished prefills with KV that waits here for a decode worker"
        yield _gauge("handoffs_held", waiting, num_held)
        yield _gauge("handoffs_oldest_seconds", "For how long the oldest of them has waited", oldest_seconds)

    def _handoffs_held(self) -> tuple[int, float]:
        made = list(self._made.values())
        if not made:
            return self._handoffs.count(), self._handoffs.oldest_seconds()
        since = [at for _, at in made if at is not None]
        return sum(count for count, _ in made), max(0.0, self._clock() - min(since)) if since else 0.0

    def _count(self, name: str, more: float) -> None:
        self._counted[name] = self._counted.get(name, 0) + more

    def _hold(self, name: str, rank: Any, value: float | None) -> None:
        if value is not None:
            self._held.setdefault(name, {})[rank] = value


class LoadMetrics(Collector):
    """What waits on this worker, what it refused, and which peers it skips."""

    def __init__(self, queued: Queued, breaker: CircuitBreaker) -> None:
        self._queued, self._breaker = queued, breaker

    def collect(self) -> Iterator[Metric]:
        queued = self._queued
        shed = "Requests that were refused because too many waited on this worker"
        yield CounterMetricFamily(PREFIX + "requests_shed", shed, value=queued.num_refused)
        waiting = "Requests that this worker has taken on and that have no first token yet"
        yield _gauge("queued_requests", waiting, queued.requests)
        yield _gauge("queued_tokens", "Prompt tokens of those requests", queued.tokens)
        skipped = "Workers that this one skips now, because they failed several times in a row"
        yield _gauge("breakers_open", skipped, len(self._breaker.open()))
        opened = "How often such a worker began to be skipped, or was skipped for longer"
        yield CounterMetricFamily(PREFIX + "breakers_opened", opened, value=self._breaker.times_opened)


def _tells_all(stat: Mapping[str, Any]) -> bool:
    """The embedded engine counts its handoffs, and has a record of what changes between steps: its last one holds."""
    return "numHandoffsHeld" in stat


def _num_generated(stat: Mapping[str, Any]) -> float:
    """One token for each request in the decode step, and the draft tokens that were accepted."""
    steps: int = (stat.get("inflightBatchingStats") or {}).get("numGenRequests", 0)
    drafts = stat.get("specDecodingStats") or {}
    accepted: int = drafts.get("numAcceptedTokens", 0)
    if stat.get("attentionDpRank"):
        # TensorRT-LLM repeats rank 0's draft statistics for every other rank.
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
    """Show a registry on the page of DYN_SYSTEM_PORT, with the labels of Dynamo's metrics and the role's component."""
    # prometheus_client would add a `_created` series to each series, which is of no use.
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
    """Length and age of the prefill queue; every worker of the queue shows the same numbers."""

    def __init__(self, depth: Callable[[], int], age: Callable[[], float]) -> None:
        self._depth, self._age = depth, age

    def collect(self) -> Iterator[Metric]:
        waiting = "Prefills in the queue that no worker has begun"
        yield _gauge("prefill_queue_depth", waiting, self._depth())
        age = "For how long the oldest of them has waited"
        yield _gauge("prefill_queue_age_seconds", age, self._age())
