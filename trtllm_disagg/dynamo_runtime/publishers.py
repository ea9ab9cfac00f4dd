"""Publishes a serving worker's cache events, load and metrics, and each engine step for the Planner."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import dynamo._core
from dynamo.llm import FpmDirectPublisher, KvEventPublisher, WorkerMetricsPublisher

from trtllm_disagg.config.worker_config import ScheduleStyle, WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import (
    DynamoMetrics,
    EngineMetrics,
    LoadMetrics,
    StepMetrics,
    expose,
    registry_of,
)
from trtllm_disagg.dynamo_runtime.request_metrics import (
    EngineRequestMetrics,
    FrontendRequests,
    RequestMetrics,
    phase_of_frontends,
)
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime, ServedModel
from trtllm_disagg.engine.cache_events import CacheEvents, StoredBlocks
from trtllm_disagg.engine.capabilities import event_buffer_of
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.readers import EngineReaders, Records, Statistics, StatsSink
from trtllm_disagg.handlers.cached_prefix import CachedPrefixes
from trtllm_disagg.handlers.live_state import LiveState

log = logging.getLogger(__name__)


class KvEventForwarder:
    """Forwards cache events to routers, from `start` to `stop`, by a source per rank and router. Opened again, its
    routers forget the previous sources.
    """

    def __init__(
        self, events: CacheEvents, openers: Mapping[int, Sequence[Callable[[], Any]]], metrics: DynamoMetrics
    ) -> None:
        """`openers`: rank -> functions that open its sources, each a KvEventPublisher of Dynamo. Routers find a source
        in discovery until its `shutdown`.
        """
        self._events, self._openers, self._metrics = events, openers, metrics
        self._sources: dict[int, list[Any]] = {}

    async def start(self) -> None:
        self._events.subscribe(self)

    async def stop(self) -> None:
        self._events.unsubscribe(self)
        self._close()

    def open(self) -> None:
        self._close()
        self._sources = {rank: [each() for each in openers] for rank, openers in self._openers.items()}

    def stored(self, rank: int, blocks: StoredBlocks) -> None:
        for source in self._sources.get(rank, ()):
            source.publish_stored(**blocks._asdict())

    def removed(self, rank: int, block_hashes: list[int]) -> None:
        for source in self._sources.get(rank, ()):
            source.publish_removed(block_hashes)

    def lost(self, rank: int, count: int) -> None:
        self._metrics.lost_events.inc(count)

    def polled(self, count: int) -> None:
        self._metrics.polled_events.observe(count)

    def _close(self) -> None:
        sources, self._sources = self._sources, {}
        for source in (source for of_rank in sources.values() for source in of_rank):
            with suppress(Exception):  # it may have ended with its runtime
                source.shutdown()


class OwnCache:
    """Keeps this worker's view of its own cache, on the event loop that serves requests."""

    def __init__(self, events: CacheEvents, cached: CachedPrefixes, num_ranks: int) -> None:
        self._events, self._cached, self._num_ranks = events, cached, num_ranks
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        self._events.subscribe(self)

    async def stop(self) -> None:
        self._events.unsubscribe(self)

    def open(self) -> None:
        for rank in range(self._num_ranks):
            self._forget(rank)

    def stored(self, rank: int, blocks: StoredBlocks) -> None:
        self._loop.call_soon_threadsafe(lambda: self._cached.of_rank(rank).publish_stored(**blocks._asdict()))

    def removed(self, rank: int, block_hashes: list[int]) -> None:
        self._loop.call_soon_threadsafe(lambda: self._cached.of_rank(rank).publish_removed(block_hashes))

    def lost(self, rank: int, count: int) -> None:
        self._forget(rank)

    def polled(self, count: int) -> None:
        """The number does not matter."""

    def _forget(self, rank: int) -> None:
        """Treat all as uncached until stored again."""
        self._loop.call_soon_threadsafe(lambda: self._cached.of_rank(rank).clear())


#: Dynamo's argument -> the statistics that add up to it, as in Dynamo's worker. TensorRT-LLM has all since its PR
#: 13199. Paused requests count as queued.
_SOURCES: Mapping[str, tuple[str, ...]] = {
    "scheduled_num_prefill_requests": ("numContextRequests",),
    "scheduled_sum_prefill_tokens": ("numCtxTokens",),
    "scheduled_sum_prefill_kv_tokens": ("numCtxKvTokens",),
    "scheduled_num_decode_requests": ("numGenRequests",),
    "scheduled_sum_decode_kv_tokens": ("numGenKvTokens",),
    "queued_num_prefill_requests": ("numQueuedContextRequests",),
    "queued_sum_prefill_tokens": ("numQueuedCtxTokens",),
    "queued_num_decode_requests": ("numPausedRequests", "numQueuedGenRequests"),
    "queued_sum_decode_kv_tokens": ("numPausedKvTokens", "numQueuedGenKvTokens"),
}
NEEDED = frozenset(name for names in _SOURCES.values() for name in names)


class ForwardPassMetrics:
    """Publishes each engine step for Dynamo's Planner. Dynamo's publisher reports an idle worker each second."""

    def __init__(self, steps: FpmDirectPublisher) -> None:
        #: None once publishing has ended.
        self._steps: FpmDirectPublisher | None = steps

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        self._end()

    def update(self, stat: Mapping[str, Any]) -> None:
        """Publish one record of `get_stats_async`. An incomplete record ends publishing: with zeros instead, the
        Planner would take a busy worker for an idle one.
        """
        if self._steps is None:
            return
        batch = stat.get("inflightBatchingStats") or {}
        if missing := NEEDED - batch.keys():
            lacks = ", ".join(sorted(missing))
            log.warning("no forward-pass metrics: the engine's statistics lack %s", lacks)
            self._end()
            return
        values = {name: sum(int(batch[source]) for source in sources) for name, sources in _SOURCES.items()}
        seconds = float(stat.get("iterLatencyMS") or 0.0) / 1000
        self._steps.publish(dp_rank=stat.get("attentionDpRank") or 0, **values, wall_time_secs=seconds)

    def _end(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.shutdown()


#: An engine without requests takes no steps after this silence. Most blocks of its last step are free, or will be after
#: its next one, when TensorRT-LLM releases fetched KV.
SILENT_SECONDS = 10.0


class StatsForwarder:
    """Forwards the engine's statistics: the newest record to the router, as this worker's load, and all records to
    `sinks`. For an idle engine the router gets a load of 0: otherwise it might avoid a worker that looks full, since
    TensorRT-LLM reports freed blocks only in its next step. A hanging engine keeps its load.
    """

    def __init__(
        self,
        statistics: Statistics,
        load: WorkerMetricsPublisher,
        *sinks: StatsSink,
        num_ranks: int = 1,
        has_requests: Callable[[], bool] = lambda: False,
        on_idle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._statistics, self._load, self._sinks = statistics, load, sinks
        self._has_requests, self._on_idle, self._clock = has_requests, on_idle, clock
        #: When the last record came or a request last ran; None after sending a load of 0.
        self._busy_at: float | None = None
        self._ranks: Sequence[int | None] = range(num_ranks) if num_ranks > 1 else (None,)

    async def start(self) -> None:
        # The router needs a load before the engine's first step.
        self._publish_none()
        self._statistics.subscribe(self)

    async def stop(self) -> None:
        self._statistics.unsubscribe(self)

    def polled(self, records: Records) -> None:
        newest: dict[int | None, int] = {}
        for stat in records:
            for sink in self._sinks:
                sink.update(stat)
            used = (stat.get("kvCacheStats") or {}).get("usedNumBlocks", 0)
            newest[stat.get("attentionDpRank")] = used
        for rank, used in newest.items():
            self._load.publish(rank, kv_used_blocks=used)
        now = self._clock()
        if records or self._has_requests():
            self._busy_at = now
        elif self._busy_at is not None and now - self._busy_at >= SILENT_SECONDS:
            self._busy_at = None
            self._on_idle()
            self._publish_none()

    def _publish_none(self) -> None:
        for rank in self._ranks:
            self._load.publish(rank, kv_used_blocks=0)


#: The metrics from the engine's statistics.
Exposed = EngineMetrics | DynamoMetrics | StepMetrics


class Publisher(Protocol):
    """Publishes in one role term, from `start` to `stop`."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Publishing:
    """Creates a worker's publishers for a role term."""

    config: WorkerConfig
    runtime: Runtime
    engine: Engine
    model: ServedModel
    live: LiveState
    readers: EngineReaders
    metrics: DynamoMetrics

    async def publishers(self) -> list[Publisher]:
        """The publishers that the flags ask for."""
        runtime, num_ranks = self.runtime, self.engine.num_ranks
        events = self._kv_events()
        if not self.config.reads_statistics:
            return events
        exposed = self._exposed() if self.config.publish_metrics else []
        # The Planner listens at the role's endpoint, whatever stage this worker is.
        planned = runtime.endpoint_for_workers
        forward_pass = ForwardPassMetrics(
            FpmDirectPublisher(planned, str(planned.connection_id()), num_ranks)
        )
        load = WorkerMetricsPublisher()
        await load.create_endpoint(runtime.endpoint_for_frontends)
        stats = StatsForwarder(
            self.readers.statistics,
            load,
            *(self.live.occupancy, *exposed, forward_pass),
            num_ranks=num_ranks,
            has_requests=self.engine.has_requests,
            on_idle=partial(_show_idle, self.live, exposed),
        )
        return [*events, stats, forward_pass]

    def _kv_events(self) -> list[Publisher]:
        """The publishers of cache events to frontends, peers and this worker's decider."""
        config, runtime, events = self.config, self.runtime, self.readers.events
        #: (endpoint, owner of the KV state published there)
        listeners = []
        if config.publish_kv_events:
            listeners.append((runtime.endpoint_for_frontends, config.kv_state_endpoint))
        if config.informs_peers:
            listeners.append((runtime.endpoint_for_workers, None))
        if not listeners and not config.reads_kv_events:
            return []
        self.metrics.event_buffer.set(event_buffer_of(self.engine.llm))
        publisher = partial(
            KvEventPublisher,
            kv_block_size=self.model.block_size,
            enable_local_indexer=True,
            image_token_id=image_token_id(config),
        )
        openers = {
            rank: [partial(publisher, at, dp_rank=rank, kv_state_endpoint=owner) for at, owner in listeners]
            for rank in range(self.engine.num_ranks)
        }
        forwarder = KvEventForwarder(events, openers, self.metrics)
        own = OwnCache(events, self.live.cached, self.engine.num_ranks)
        return [forwarder, own] if config.reads_kv_events else [forwarder]

    def _exposed(self) -> list[Exposed]:
        """Put all metrics on this worker's page. Returns those fed by the engine's statistics."""
        config, endpoint, live = self.config, self.runtime.endpoint_for_frontends, self.live
        of_engine, steps = EngineMetrics(self.engine.handoffs), StepMetrics(config.model_name)
        requests = RequestMetrics(
            phase_of_frontends(config),
            decode_sends_all=config.schedule_style is ScheduleStyle.GENERATION_FIRST,
            instance_id=endpoint.connection_id(),
        )
        engine_requests = EngineRequestMetrics(config.model_name)
        of_worker = registry_of(of_engine, LoadMetrics(live.queued, live.breaker), steps)
        for registry in (of_worker, requests.registry, engine_requests.registry, self.metrics.registry):
            expose(registry, endpoint, config)
        live.sinks.extend((requests, engine_requests, self.metrics))
        if config.may_switch:
            at_front = FrontendRequests(config, endpoint.connection_id())
            at_front.expose(endpoint)
            live.sinks.append(at_front)
        return [of_engine, self.metrics, steps]


def image_token_id(config: WorkerConfig) -> int | None:
    """The token by which frontends and KV routers find images in blocks; None for text, and for model families with
    images that no frontend can expand.
    """
    # Missing from builds of Dynamo without this part.
    resolve = getattr(dynamo._core, "resolve_routing_image_token_id", None)
    return resolve(config.model, config.model) if resolve and config.images else None


def _show_idle(live: LiveState, exposed: Sequence[Exposed]) -> None:
    live.occupancy.clear()
    for metrics in exposed:
        metrics.show_idle()
