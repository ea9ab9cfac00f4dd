"""What the engine did and holds, as numbers on the worker's own /metrics page, and how all numbers get there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from dynamo.common.utils.prometheus import register_engine_metrics_callback
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtllm_disagg.config.settings import COMPONENTS, parse_endpoint_id
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.handlers.admission import Queued

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
#: The embedded engine's own running totals. TensorRT-LLM has no such numbers; then there is no such metric.
_TOTALS = {
    "kv_pulls": "kvPulls",
    "kv_bytes_pulled": "kvBytesPulled",
    "kv_bytes_saved": "kvBytesSaved",
    "kv_pushes": "kvPushes",
    "kv_bytes_pushed": "kvBytesPushed",
}


class LabelValues:
    """What one label may say: `known`, and the first others up to `most` in all. A series, once shown, is kept for
    ever, so any further value is `other`.
    """

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


class Breaker(Protocol):
    """Of the instances of the other role."""

    times_opened: int

    def num_open(self) -> int: ...


class Handoffs(Protocol):
    """For engines that do not count them."""

    def count(self) -> int: ...

    def oldest_seconds(self) -> float: ...


class EngineMetrics(Collector):
    """Adds up the engine's per-iteration statistics; every rank of attention DP sends its own."""

    def __init__(
        self,
        queued: Queued,
        breaker: Breaker,
        handoffs: Handoffs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: the engine's, too."""
        self._queued = queued
        self._breaker = breaker
        self._handoffs = handoffs
        self._clock = clock
        self._counted: dict[str, float] = {}
        self._held: dict[str, dict[Any, float]] = {}
        #: By rank: handoffs that it holds, and when it made the oldest one.
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
        self._hold(
            "requests_active", rank, stat.get("numActiveRequests", 0) + stat.get("numQueuedRequests", 0)
        )
        if "numHandoffsHeld" in stat:
            self._made[rank] = stat["numHandoffsHeld"], stat.get("oldestHandoffAt")

    def collect(self) -> Iterator[Metric]:
        # Dynamo asks from a thread of its own: no dict is iterated that may grow meanwhile.
        for name, value in list(self._counted.items()):
            yield CounterMetricFamily(PREFIX + name, _COUNTERS[name], value=value)
        for name, by_rank in list(self._held.items()):
            yield _gauge(name, _GAUGES[name], sum(list(by_rank.values())))
        num_held, oldest_seconds = self._handoffs_held()
        yield _gauge(
            "handoffs_held", "Finished prefills with KV that waits here for a decode worker", num_held
        )
        yield _gauge("handoffs_oldest_seconds", "For how long the oldest of them has waited", oldest_seconds)
        queued = self._queued
        shed = "Requests that were refused because too many waited on this worker"
        yield CounterMetricFamily(PREFIX + "requests_shed", shed, value=queued.shed)
        waiting = "Requests that this worker has taken on and that have no first token yet"
        yield _gauge("queued_requests", waiting, queued.requests)
        yield _gauge("queued_tokens", "Prompt tokens of those requests", queued.tokens)
        skipped = "Workers of the other role that are skipped now, because they failed several times in a row"
        yield _gauge("breakers_open", skipped, self._breaker.num_open())
        opened = "How often such a worker began to be skipped, or was skipped for longer"
        yield CounterMetricFamily(PREFIX + "breakers_opened", opened, value=self._breaker.times_opened)

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


def _num_generated(stat: Mapping[str, Any]) -> float:
    """A token for each request of a decode step, and what they accepted of their drafts."""
    steps: int = (stat.get("inflightBatchingStats") or {}).get("numGenRequests", 0)
    drafts = stat.get("specDecodingStats") or {}
    accepted: int = drafts.get("numAcceptedTokens", 0)
    if stat.get("attentionDpRank"):
        # These are rank 0's, which TensorRT-LLM tells of all ranks.
        drafting: int = drafts.get("numRequestsWithDraftTokens", 0)
        return steps * (1 + accepted / max(drafting, 1))
    return steps + accepted


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def registry_of(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def expose(registry: CollectorRegistry, endpoint: Any, config: WorkerConfig) -> None:
    """On the page that DYN_SYSTEM_PORT opens, with the labels that Dynamo's own metrics have; the component is that of
    this worker's role, whichever stage it is.
    """
    # When each series began: twice as many series, of which no rate is ever asked.
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


class QueueState(Protocol):
    def depth(self) -> int: ...

    def age(self) -> float: ...


class QueueMetrics(Collector):
    """What waits in the prefill queue, as gauges; every worker of the queue shows the same numbers."""

    def __init__(self, queue: QueueState) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        waiting = "Prefills in the queue that no worker has begun"
        yield _gauge("prefill_queue_depth", waiting, self._queue.depth())
        age = "For how long the oldest of them has waited"
        yield _gauge("prefill_queue_age_seconds", age, self._queue.age())
