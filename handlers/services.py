"""What a worker answers: a frontend the whole request, a worker of the other role its phase or the whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trtllm_disagg.config.thresholds import Live, Thresholds, read_policy_file
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import ConfigError, PeerUnavailableError
from trtllm_disagg.handlers.admission import Queued
from trtllm_disagg.handlers.chain import decode_service
from trtllm_disagg.handlers.circuit_breaker import (
    CircuitBreaker,
    CircuitBreakerClient,
    first_decode_token_seconds,
    stream_timeouts_of,
)
from trtllm_disagg.handlers.concurrent import LocalPush, push_service
from trtllm_disagg.handlers.decide import (
    Auto,
    CachedPrefixes,
    FactSources,
    QueueDepth,
    conditional,
    create_auto_decider,
    create_decider,
)
from trtllm_disagg.handlers.fallback import FallbackStep, Replays, always, replay_if_needed, with_fallback
from trtllm_disagg.handlers.local import LocalAgg, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.migration import finish_if_budget_exhausted, resume_migrated
from trtllm_disagg.handlers.occupancy import (
    Occupancies,
    OwnOccupancy,
    RunningRequests,
    within_fallback_budget,
)
from trtllm_disagg.handlers.recall import Recalls, recallable
from trtllm_disagg.handlers.remote import RemoteDrain, StageClient
from trtllm_disagg.handlers.route import StrategyRouter, relayed
from trtllm_disagg.handlers.select import RequireConsumers
from trtllm_disagg.handlers.trace import RequestSink
from trtllm_disagg.strategies import orders, spec_of
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import require_splittable
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol, choose_protocol

log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LiveState:
    """What changes while a worker serves: settings, by a command or the policy file, and what it observes."""

    strategy: Live[str]
    thresholds: Live[Thresholds]
    cached: CachedPrefixes
    breaker: CircuitBreaker
    #: Hear of every request that ends.
    sinks: list[RequestSink] = field(default_factory=list)
    queued: Queued = field(default_factory=Queued)
    occupancy: OwnOccupancy = field(default_factory=OwnOccupancy)
    #: Of the other stage's instances.
    other_occupancy: Occupancies = field(default_factory=Occupancies)

    @classmethod
    def of(
        cls, config: WorkerConfig, block_size: int, other_occupancy: Occupancies | None = None
    ) -> LiveState:
        """`block_size` in tokens. Raises ConfigError when the policy file is wrong."""
        live = cls(
            Live(config.strategy),
            Live(Thresholds.of(config)),
            CachedPrefixes(block_size),
            CircuitBreaker(config.breaker_failures, config.breaker_seconds),
            other_occupancy=other_occupancy or Occupancies(),
        )
        if config.policy_file is not None:
            live.set_thresholds(read_policy_file(Path(config.policy_file)), config.policy_file)
        return live

    def set_thresholds(self, values: Mapping[str, Any], source: str) -> list[str]:
        """The differences. Raises ConfigError, and then nothing has changed."""
        old = self.thresholds.value
        new = old.changed(values, source)
        differences = old.differences(new)
        if differences:
            self.thresholds.set(new)
            log.info("thresholds changed by %s: %s", source, ", ".join(differences))
        return differences


async def watch_policy_file(path: Path, live: LiveState) -> None:
    """Returns never. A file that is wrong now is reported once, and the old values stay. It is read at once: it may
    have changed since the worker's start.
    """
    seen = None
    while True:
        stamp = _stamp(path)
        if stamp == seen:
            await asyncio.sleep(_WATCH_SECONDS)
            continue
        seen = stamp
        try:
            live.set_thresholds(read_policy_file(path), str(path))
        except ConfigError as error:
            log.error("the old thresholds stay: %s", error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@dataclass(frozen=True, slots=True)
class StrategyParts:
    """What a worker answers with: its own engine, and the way to the workers of the other role."""

    role: Role
    engine: Engine
    stage: StageClient
    style: ScheduleStyle = ScheduleStyle.CONTEXT_FIRST
    #: Seconds for the phases that run here.
    prefill_timeout: float = 120.0
    first_decode_token_timeout: float = 60.0
    protocol: HandoffProtocol = DYNAMO
    #: The prefill queue, under --prefill-dispatch queue.
    prefills: StageClient | None = None
    #: This worker, as the workers of the other role see it.
    instance_id: int | None = None
    #: Requests whose second phase is, or will be, this worker's, whichever worker has them from the frontend.
    decoding: RunningRequests = field(default_factory=RunningRequests)

    @property
    def pushes(self) -> bool:
        """Both phases are dispatched at once, and prefill writes into decode's blocks."""
        return self.style is ScheduleStyle.GENERATION_FIRST


class SharedQueue(QueueDepth, Protocol):
    """The prefill queue, as a request path uses it (`prefill_queue.PrefillQueue`)."""

    @property
    def client(self) -> StageClient | None:
        """The way to whichever prefill worker has room; None where there is no queue."""
        ...


def build_generate(
    config: WorkerConfig,
    engine: Engine,
    stage: StageClient,
    live: LiveState | None = None,
    queue: SharedQueue | None = None,
    instance_id: int | None = None,
) -> Generate:
    """How this worker, the instance `instance_id`, answers a request. `stage` is the way to the workers of the other
    role.
    """
    if config.role is Role.AGG:
        return resume_migrated(_in_one_way("agg", config, engine, stage), _replays_of(engine))
    if spec_of(config.strategy).is_worker_side:
        live = live or LiveState.of(config, config.kv_block_size)
        generate = _worker_side(config, engine, stage, live, queue, instance_id)
    else:
        # Not resumed: under router, Dynamo's migration link is from the prefill worker to the decode worker.
        generate = _in_one_way(config.strategy, config, engine, stage)
    return _splittable(generate, config)


def _replays_of(engine: Engine) -> Replays:
    return always if engine.is_exact else replay_if_needed


def _in_one_way(name: str, config: WorkerConfig, engine: Engine, stage: StageClient) -> Generate:
    """The strategy of that name for every request: no worker calls another, so there is nothing to choose."""
    whole = build_strategy(name, StrategyParts(config.role, engine, stage))

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        request.trace.chose(name, "default")
        return whole(request, context)

    return finish_if_budget_exhausted(generate)


def _splittable(generate: Generate, config: WorkerConfig) -> Generate:
    """Whether this worker would share a request or not: what only one that runs it whole can serve is refused."""
    is_told_of_prompts = (
        spec_of(config.strategy).is_worker_side and config.schedule_style is ScheduleStyle.CONTEXT_FIRST
    )

    def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        require_splittable(request, is_told_of_prompts=is_told_of_prompts)
        return generate(request, context)

    return answer


def _worker_side(
    config: WorkerConfig,
    engine: Engine,
    stage: StageClient,
    live: LiveState,
    queue: SharedQueue | None,
    instance_id: int | None,
) -> Generate:
    """A worker that calls, or is called by, workers of the other role."""
    timeouts = stream_timeouts_of(config)
    watched = CircuitBreakerClient(stage, live.breaker, timeouts)
    through_queue: StageClient | None = None
    waiting: QueueDepth = watched
    if queue is not None and queue.client is not None:
        consumed = _require_consumers(config, queue.client, stage)
        through_queue, waiting = CircuitBreakerClient(consumed, live.breaker, timeouts), queue
    parts = StrategyParts(
        config.role,
        engine,
        watched,
        config.schedule_style,
        config.prefill_timeout,
        first_decode_token_seconds(config),
        choose_protocol(config.handoff_protocol),
        through_queue,
        instance_id,
    )
    sources = FactSources(config.role, live.cached, waiting, live.occupancy, live.other_occupancy)
    replays = _replays_of(engine)
    whole = _strategy_router(config, parts, watched, sources, live, replays)
    return resume_migrated(finish_if_budget_exhausted(served(parts, whole)), replays)


def _require_consumers(config: WorkerConfig, queue: StageClient, workers: StageClient) -> StageClient:
    """Under `local` nothing waits in it for a worker that is not there; a prefill worker is there itself."""
    waits = config.role is Role.PREFILL or config.on_missing_stage == "fail"
    return queue if waits else RequireConsumers(queue, workers)


def _strategy_router(
    config: WorkerConfig,
    parts: StrategyParts,
    stage: CircuitBreakerClient,
    sources: FactSources,
    live: LiveState,
    replays: Replays,
) -> StrategyRouter:
    """`local`, each order of the two phases and `auto`, as ways to answer. Behind each order are its fallback steps;
    before the deployment's own one is the decider, which may keep a request on this worker.
    """
    local = LocalAgg(parts.engine)
    kept = sources.kept.counting(local)
    own = [order.name for order in orders() if order.entry_role == parts.role]
    others = [order.name for order in orders() if order.entry_role != parts.role]
    relays = {name: relayed(stage, name) for name in others}
    steps_after = partial(
        _fallback_steps,
        config,
        local=within_fallback_budget(local, live.thresholds),
        relay=FallbackStep("other_stage", relays[others[0]], others[0], without_engine=True),
    )
    first_steps = {name: build_strategy(name, parts) for name in own} | relays
    ways = {name: with_fallback(steps_after(first), replays) for name, first in first_steps.items()}
    ways |= {name: parts.decoding.counting(ways[name]) for name in own}
    decider = create_decider(config.prefill_decider, sources, live.thresholds)
    deployed = {name: conditional(decider, kept, way) for name, way in ways.items()}
    ways["local"] = kept
    auto = Auto(
        create_auto_decider(config.prefill_decider, sources, live.thresholds),
        ways,
        (own[0], others[0]),
        stage.num_healthy,
        lambda: parts.decoding.requests + sources.kept.requests < config.max_batch_size,
    )
    return StrategyRouter(ways | {"auto": auto}, deployed | {"auto": auto}, live.strategy, stage.check)


def _fallback_steps(
    config: WorkerConfig, first: Generate, *, local: Generate, relay: FallbackStep
) -> list[FallbackStep]:
    """`first`, again on other instances; then this worker alone, if it may. `relay` is for a request that has lost this
    worker's engine.
    """
    steps = [FallbackStep("other_instance", first)] * config.max_tries
    if config.on_missing_stage == "local":
        steps.append(FallbackStep("local", local, "local"))
    return steps + [relay] * config.max_tries


def build_strategy(name: str, parts: StrategyParts) -> Generate:
    """How a worker of that strategy's entry role answers a whole request."""
    return spec_of(name).load_builder()(parts)


def served(parts: StrategyParts, whole: Generate) -> Generate:
    """`whole`, and this role's phase for the workers of the other role."""
    own = parts.role.value
    phase = _PHASES[parts.role](parts)

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        asked = request.phase_request
        if asked is None or asked.stage == "whole":
            return whole(request, context)
        if (Role.PREFILL if asked.is_notice else asked.stage) != own:
            raise PeerUnavailableError(f"a {own} worker was asked for the phase {asked.stage}")
        return phase(request, context)

    return generate


def _prefill(parts: StrategyParts) -> Generate:
    if parts.pushes:
        return push_service(LocalPush(parts.engine, parts.protocol))
    drain = RemoteDrain(parts.stage, parts.protocol)
    recalls = Recalls(parts.stage.instance_ids, parts.engine.handoffs.lease_seconds)
    return recallable(LocalPrefill(parts.engine, drain), recalls, parts.protocol)


def _decode(parts: StrategyParts) -> Generate:
    decode = decode_service(LocalDecode(parts.engine, repeats_first_token=parts.pushes))
    return parts.decoding.counting(decode)


_PHASES = {Role.PREFILL: _prefill, Role.DECODE: _decode}
