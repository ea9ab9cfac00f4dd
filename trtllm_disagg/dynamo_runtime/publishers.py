"""The publishers of a worker: cache events, load, and what each step of the engine did (forward-pass metrics, for
Dynamo's Planner), sent while it serves. `create_publishers` says which.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

from dynamo.llm import FpmDirectPublisher, KvEventPublisher, WorkerMetricsPublisher

from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import DynamoMetrics, EngineMetrics, expose, registry_of
from trtllm_disagg.dynamo_runtime.polling import (
    EVENTS_TIMEOUT,
    STATS_TIMEOUT,
    NullPublisher,
    PollingPublisher,
    Publisher,
)
from trtllm_disagg.dynamo_runtime.request_metrics import (
    EngineRequestMetrics,
    FrontRequests,
    RequestMetrics,
)
from trtllm_disagg.dynamo_runtime.worker_endpoint import ServedModel
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.handlers.services import Policy

log = logging.getLogger(__name__)

#: Dynamo's argument -> the statistics that add up to it, as upstream's worker maps them. TensorRT-LLM has all of them
#: since its PR 13199. Work that is paused waits as work that is queued does.
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


class Steps(Protocol):
    """Dynamo's FpmDirectPublisher, as far as we use it. It says by itself, each second, that a worker is idle."""

    def publish(self, **values: float) -> None: ...

    def shutdown(self) -> None: ...


class NullSteps:
    def publish(self, **values: float) -> None:
        """Nowhere to publish."""

    def shutdown(self) -> None:
        """Nothing to end."""


class ForwardPassMetrics:
    """A sink of the engine's statistics."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def start(self) -> None:
        """It is told by `update`."""

    async def stop(self) -> None:
        self._end()

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`. One that lacks numbers ends this: in their place zeros would be published,
        by which the Planner takes a busy worker for an idle one.
        """
        batch = stat.get("inflightBatchingStats") or {}
        if missing := NEEDED - batch.keys():
            if not isinstance(self._steps, NullSteps):
                lacks = ", ".join(sorted(missing))
                log.warning("no forward-pass metrics: the engine's statistics lack %s", lacks)
                self._end()
            return
        values = {name: sum(int(batch[source]) for source in sources) for name, sources in _SOURCES.items()}
        seconds = float(stat.get("iterLatencyMS") or 0.0) / 1000
        self._steps.publish(dp_rank=stat.get("attentionDpRank") or 0, **values, wall_time_secs=seconds)

    def _end(self) -> None:
        steps, self._steps = self._steps, NullSteps()
        steps.shutdown()


class LoadSink(Protocol):
    """Dynamo's WorkerMetricsPublisher, as far as we use it."""

    def publish(
        self, dp_rank: int | None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None
    ) -> None: ...


class StatsSink(Protocol):
    def update(self, stat: Mapping[str, Any]) -> None: ...


class StatsForwarder(PollingPublisher):
    """The engine's statistics to the router's load and to this worker's /metrics; the only reader of that stream:
    TensorRT-LLM has one queue for all that ask.

    Needs enable_iter_perf_stats. Of what came together, the router gets the newest and the metrics all.
    """

    def __init__(self, llm: Any, load: LoadSink, *sinks: StatsSink, num_ranks: int = 1) -> None:
        super().__init__("engine-stats")
        self._llm = llm
        self._load = load
        self._sinks = sinks
        self._ranks: Sequence[int | None] = range(num_ranks) if num_ranks > 1 else (None,)

    async def start(self) -> None:
        # The engine has no statistics before its first step, but the router asks.
        for rank in self._ranks:
            self._load.publish(rank, kv_used_blocks=0)
        await super().start()

    def records(self) -> AsyncIterator[dict[str, Any]]:
        stats: AsyncIterator[dict[str, Any]] = self._llm.get_stats_async(timeout=STATS_TIMEOUT)
        return stats

    def publish(self, records: list[dict[str, Any]]) -> None:
        newest: dict[int | None, int] = {}
        for stat in records:
            for sink in self._sinks:
                sink.update(stat)
            used = (stat.get("kvCacheStats") or {}).get("usedNumBlocks", 0)
            newest[stat.get("attentionDpRank")] = used
        for rank, used in newest.items():
            self._load.publish(rank, kv_used_blocks=used)


class EventSink(Protocol):
    """Dynamo's KvEventPublisher, as far as we use it."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None: ...

    def publish_removed(self, block_hashes: list[int]) -> None: ...


class KvEventForwarder(PollingPublisher):
    """The engine's KV cache events to the router's index: those of each rank of attention DP to that rank's sinks,
    since each rank has a cache of its own.
    """

    def __init__(
        self, llm: Any, ranks: Sequence[EventsOfRank], polled: Callable[[int], None] = lambda count: None
    ) -> None:
        """`polled` is told how many events came at once."""
        super().__init__("kv-events")
        self._llm = llm
        self._ranks = ranks
        self._polled = polled

    def records(self) -> AsyncIterator[dict[str, Any]]:
        events: AsyncIterator[dict[str, Any]] = self._llm.get_kv_cache_events_async(timeout=EVENTS_TIMEOUT)
        return events

    def publish(self, records: list[dict[str, Any]]) -> None:
        self._polled(len(records))
        for event in records:
            try:
                self._ranks[event.get("attention_dp_rank") or 0].forward(event)
            except Exception:
                # The router's view is wrong without it, but wronger still without those behind it.
                log.exception("%s: an event of the engine cannot be published: %s", self._name, event)


class EventsOfRank:
    """Only whole blocks are published: the router cannot place a request on a part of one."""

    def __init__(
        self,
        sinks: Sequence[EventSink],
        block_size: int,
        on_gap: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`on_gap` is told how many events were lost."""
        self._on_gap = on_gap
        self._sinks = sinks
        self._block_size = block_size
        #: Blocks that the router was not told about, so that it is not told of their end either.
        self._unknown: set[int | str] = set()
        self._next_event_id: int | None = None
        self._window = 0

    def forward(self, event: dict[str, Any]) -> None:
        """One event of TensorRT-LLM's format."""
        self._note_gaps(event)
        if not self._is_of_widest_window(event):
            return
        data = event["data"]
        if data["type"] == "stored":
            self._stored(data)
        elif data["type"] == "removed":
            self._removed(data)

    def _stored(self, data: dict[str, Any]) -> None:
        blocks = data["blocks"]
        whole = list(takewhile(lambda block: len(block["tokens"]) == self._block_size, blocks))
        # What follows a part of a block hangs on something that the router does not know.
        self._unknown.update(block["block_hash"] for block in blocks[len(whole) :])
        if whole:
            parent = data["parent_hash"]
            token_ids = [token["token_id"] for block in whole for token in block["tokens"]]
            for sink in self._sinks:
                sink.publish_stored(
                    token_ids=token_ids,
                    num_block_tokens=[self._block_size] * len(whole),
                    block_hashes=[signed(block["block_hash"]) for block in whole],
                    parent_hash=None if parent is None else signed(parent),
                    cache_salt=whole[0].get("cache_salt"),
                )

    def _removed(self, data: dict[str, Any]) -> None:
        known = [block for block in data["block_hashes"] if block not in self._unknown]
        self._unknown.difference_update(data["block_hashes"])
        if known:
            for sink in self._sinks:
                sink.publish_removed([signed(block) for block in known])

    def _is_of_widest_window(self, event: dict[str, Any]) -> bool:
        """A model with sliding windows tells of every block once per window; one of them is enough."""
        window = event.get("window_size") or 0
        self._window = max(self._window, window)
        return window == self._window

    def _note_gaps(self, event: dict[str, Any]) -> None:
        event_id = event.get("event_id")
        if event_id is None:
            return
        due = event_id if self._next_event_id is None else self._next_event_id
        if event_id != due:
            log.warning(
                "KV event %d came where %d was due: the router's view of this cache is stale; raise "
                "kv_cache_config.event_buffer_max_size",
                event_id,
                due,
            )
            self._on_gap(max(0, event_id - due))
        self._next_event_id = event_id + 1


class OnLoop:
    """A sink that belongs to the event loop that serves requests, for a publisher in another thread."""

    def __init__(self, sink: EventSink, loop: asyncio.AbstractEventLoop) -> None:
        self._sink = sink
        self._loop = loop

    def publish_stored(self, *args: Any, **keywords: Any) -> None:
        self._loop.call_soon_threadsafe(partial(self._sink.publish_stored, *args, **keywords))

    def publish_removed(self, block_hashes: list[int]) -> None:
        self._loop.call_soon_threadsafe(self._sink.publish_removed, block_hashes)


def signed(block_hash: int | str) -> int:
    """The engine's unsigned 64 bits, or the start of its SHA-256 in hexadecimal, as a signed number."""
    number = int(block_hash[:16], 16) if isinstance(block_hash, str) else block_hash
    return number - (1 << 64) if number >= 1 << 63 else number


async def create_publishers(
    config: WorkerConfig,
    endpoint: Any,
    peer_endpoint: Any,
    engine: Engine,
    model: ServedModel,
    policy: Policy,
    load_seconds: float,
) -> list[Publisher]:
    """For cache events, and for statistics where the flags say so. `endpoint` is where frontends find
    this worker, `peer_endpoint` where workers do; `load_seconds` is what the engine took to start.
    """
    block_size = model.block_size
    dynamo = DynamoMetrics(config, model.num_blocks, model.num_ranks)
    dynamo.loaded(load_seconds)
    #: With the endpoint that owns what is published there.
    listeners = [(endpoint, config.kv_state_endpoint)] if config.publish_kv_events else []
    listeners += [(peer_endpoint, None)] if config.tells_peers else []
    loop = asyncio.get_running_loop()

    def of_rank(rank: int) -> EventsOfRank:
        sinks: list[EventSink] = [
            KvEventPublisher(
                each,
                kv_block_size=block_size,
                dp_rank=rank,
                enable_local_indexer=True,
                kv_state_endpoint=owner,
            )
            for each, owner in listeners
        ]
        cached = policy.cached.of_rank(rank)
        if config.reads_kv_events:
            sinks.append(OnLoop(cached, loop))

        def forget(num_lost: int) -> None:
            dynamo.lost_events(num_lost)
            loop.call_soon_threadsafe(cached.clear)

        return EventsOfRank(sinks, block_size, on_gap=forget)

    events: Publisher = NullPublisher()
    if listeners or config.reads_kv_events:
        ranks = [of_rank(rank) for rank in range(engine.num_ranks)]
        events = KvEventForwarder(engine.llm, ranks, dynamo.polled_events)
    if not config.reads_statistics:
        return [events]
    sinks: list[StatsSink] = [engine.handoffs, policy.occupancy]
    if config.publish_metrics:
        metrics = EngineMetrics(policy.queued, policy.breaker, engine.handoffs)
        requests, of_engine = RequestMetrics(), EngineRequestMetrics(config.model_name)
        for registry in (registry_of(metrics), requests.registry, of_engine.registry, dynamo.registry):
            expose(registry, endpoint, config)
        policy.sinks.extend((requests, of_engine, dynamo))
        if config.may_switch:
            at_front = FrontRequests(config, endpoint.connection_id())
            at_front.expose(endpoint)
            policy.sinks.append(at_front)
        sinks += [metrics, dynamo]
    # Where the Planner looks for this role, whichever stage it is.
    steps = FpmDirectPublisher(peer_endpoint, str(peer_endpoint.connection_id()), engine.num_ranks)
    forward_pass = ForwardPassMetrics(steps)
    load = WorkerMetricsPublisher()
    await load.create_endpoint(endpoint)
    stats = StatsForwarder(engine.llm, load, *sinks, forward_pass, num_ranks=engine.num_ranks)
    return [events, stats, forward_pass]
