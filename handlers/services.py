"""Builds a worker's answer: to a frontend the whole request, to a worker of the other role one phase or the whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig, flag_of
from trtllm_disagg.config.yaml_file import read_mapping
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import ConfigError, PeerUnavailableError
from trtllm_disagg.handlers.admission import Queued, within_fallback_budget
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
    Occupancies,
    OwnOccupancy,
    QueueDepth,
    conditional,
    create_auto_decider,
    create_decider,
)
from trtllm_disagg.handlers.fallback import (
    FallbackStep,
    Replays,
    always_replay,
    replay_if_needed,
    with_fallback,
)
from trtllm_disagg.handlers.local import LocalAgg, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.migration import finish_if_budget_exhausted, resume_migrated
from trtllm_disagg.handlers.outputs import FewTurnsLater, at_once
from trtllm_disagg.handlers.recall import Recalls, recallable
from trtllm_disagg.handlers.remote import QueueStageClient, RemoteDrain, StageClient
from trtllm_disagg.handlers.route import StrategyRouter, relayed
from trtllm_disagg.handlers.trace import RequestSink
from trtllm_disagg.strategies import orders, spec_of
from trtllm_disagg.streams import CountedStream
from trtllm_disagg.types import Fallback, Generate, GenerateRequest, InProgress, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import require_splittable
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol, choose_protocol

log = logging.getLogger(__name__)

#: How often the policy file is checked.
_WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LiveState:
    """State that changes while a worker serves: settings (by a command or the policy file) and observations."""

    strategy: Live[str]
    thresholds: Live[Thresholds]
    cached: CachedPrefixes
    breaker: CircuitBreaker
    #: Called for every request that ends.
    sinks: list[RequestSink] = field(default_factory=list)
    queued: Queued = field(default_factory=Queued)
    occupancy: OwnOccupancy = field(default_factory=OwnOccupancy)
    #: The occupancy of the other role's workers.
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
            live.set_thresholds(
                read_mapping(Path(config.policy_file), flag_of("policy_file")), config.policy_file
            )
        return live

    def set_thresholds(self, values: Mapping[str, Any], source: str) -> list[str]:
        """Set thresholds and return the differences as texts. Raises ConfigError without changing anything."""
        old = self.thresholds.value
        new = old.changed(values, source)
        differences = old.differences(new)
        if differences:
            self.thresholds.set(new)
            log.info("thresholds changed by %s: %s", source, ", ".join(differences))
        return differences


async def watch_policy_file(path: Path, live: LiveState) -> None:
    """Apply the file's thresholds whenever it changes, and now: it may have changed while the worker started. Never
    returns. An error in it is logged once a change.
    """
    seen = None
    while True:
        stamp = _stamp(path)
        if stamp == seen:
            await asyncio.sleep(_WATCH_SECONDS)
            continue
        seen = stamp
        try:
            live.set_thresholds(read_mapping(path, flag_of("policy_file")), str(path))
        except ConfigError as error:
            log.error("--policy-file was not applied, thresholds are unchanged: %s", error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@dataclass(frozen=True, slots=True)
class StrategyParts:
    """What a strategy's builder gets: this worker's engine, and the client of the workers of the other role."""

    role: Role
    engine: Engine
    stage: StageClient
    #: That of `stage`.
    breaker: CircuitBreaker
    style: ScheduleStyle = ScheduleStyle.CONTEXT_FIRST
    #: Seconds, for a prefill on this worker's engine.
    prefill_timeout: float = 120.0
    #: Seconds, for a decode on this worker's engine.
    first_decode_token_timeout: float = 60.0
    protocol: HandoffProtocol = DYNAMO
    #: The prefill queue, under --prefill-dispatch queue.
    prefill_queue: StageClient | None = None
    #: This worker's id in discovery.
    instance_id: int | None = None

    @property
    def pushes(self) -> bool:
        """Both phases are dispatched at once, and prefill writes into decode's blocks."""
        return self.style is ScheduleStyle.GENERATION_FIRST


class SharedQueue(QueueDepth, Protocol):
    """The prefill queue, as a request path uses it (`prefill_queue.PrefillQueue`)."""

    @property
    def client(self) -> QueueStageClient | None:
        """The client of the first prefill worker with room; None where there is no queue."""
        ...


def build_generate(
    config: WorkerConfig,
    engine: Engine,
    stage: StageClient,
    live: LiveState | None = None,
    queue: SharedQueue | None = None,
    instance_id: int | None = None,
) -> Generate:
    """A worker's answer to a request. `stage`: the client of the other role's workers; `instance_id`: this worker."""
    if config.role is Role.AGG:
        agg = _in_one_way("agg", config, engine, stage)
        return resume_migrated(agg, _replays_of(engine), engine.most_tokens)
    if spec_of(config.strategy).is_worker_side:
        live = live or LiveState.of(config, config.kv_block_size)
        generate = _worker_side(config, engine, stage, live, queue, instance_id)
    else:
        # No resume_migrated: under router, Dynamo's migration link goes from the prefill to the decode worker.
        generate = _in_one_way(config.strategy, config, engine, stage)
    return _refusing_unsplittable(generate, config)


def _replays_of(engine: Engine) -> Replays:
    return always_replay if engine.is_exact else replay_if_needed


def _in_one_way(name: str, config: WorkerConfig, engine: Engine, stage: StageClient) -> Generate:
    """The strategy `name` for every request: no worker calls another, but for drains, so there is nothing to choose."""
    breaker = CircuitBreaker(config.breaker_failures, config.breaker_seconds)
    guarded = CircuitBreakerClient(stage, breaker, stream_timeouts_of(config))
    whole = build_strategy(name, StrategyParts(config.role, engine, guarded, breaker))

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        request.trace.chose(name, "default")
        return whole(request, context)

    return finish_if_budget_exhausted(generate)


def _refusing_unsplittable(generate: Generate, config: WorkerConfig) -> Generate:
    """Refuses requests that cannot be split over two workers, even if this one would have kept them."""
    gets_prompt_logprobs = (
        spec_of(config.strategy).is_worker_side and config.schedule_style is ScheduleStyle.CONTEXT_FIRST
    )

    def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        require_splittable(request, gets_prompt_logprobs=gets_prompt_logprobs)
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
    guarded = CircuitBreakerClient(stage, live.breaker, timeouts)
    through_queue: StageClient | None = None
    waiting: QueueDepth = guarded
    if queue is not None and queue.client is not None:
        if not _may_wait_for_workers(config):
            queue.client.require(stage)
        through_queue, waiting = CircuitBreakerClient(queue.client, live.breaker, timeouts), queue
    parts = StrategyParts(
        config.role,
        engine,
        stage=guarded,
        breaker=live.breaker,
        style=config.schedule_style,
        prefill_timeout=config.prefill_timeout,
        first_decode_token_timeout=first_decode_token_seconds(config),
        protocol=choose_protocol(config.handoff_protocol),
        prefill_queue=through_queue,
        instance_id=instance_id,
    )
    sources = FactSources(config.role, live.cached, waiting, live.occupancy, live.other_occupancy)
    replays = _replays_of(engine)
    whole = _strategy_router(config, parts, guarded, sources, live, replays)
    return resume_migrated(finish_if_budget_exhausted(served(parts, whole)), replays, engine.most_tokens)


def _may_wait_for_workers(config: WorkerConfig) -> bool:
    """Whether a request waits in the prefill queue while there is no prefill worker: not under `--on-missing-stage
    local`. A prefill worker needs no check: it pulls itself.
    """
    return config.role is Role.PREFILL or not _may_answer_alone(config)


def _strategy_router(
    config: WorkerConfig,
    parts: StrategyParts,
    stage: CircuitBreakerClient,
    sources: FactSources,
    live: LiveState,
    replays: Replays,
) -> StrategyRouter:
    """The ways to answer: `local`, each order of the two phases with its fallback steps, and `auto`. A deployment's own
    order has the decider before it, which may keep a request on this worker.
    """
    fallback_local = within_fallback_budget(LocalAgg(parts.engine), live.thresholds)
    relay = _relay_of_lost_engine(config, parts, stage)
    ways = _orders_with_fallback_steps(config, parts, stage, fallback_local, relay, replays)
    alone = FallbackStep(Fallback.LOCAL, sources.kept.counting(LocalAgg(parts.engine)), "local")
    kept = with_fallback([alone, *relay], replays, parts.engine.most_tokens)
    decider = create_decider(config.prefill_decider, sources, live.thresholds)
    deployed = {name: conditional(decider, kept, way) for name, way in ways.items()}
    ways["local"] = kept
    # `auto` chooses between two: the first order in the table that starts here, and the first that starts at a peer.
    own_order, relayed_order = _own_orders(parts.role)[0], _relayed_orders(parts.role)[0]
    # A full prefill worker can still prefill.
    full = parts.instance_id if parts.role is Role.DECODE else None
    passed_on = _fallback_steps(config, relayed(stage, relayed_order, full), fallback_local, relay)
    routes = ways | {relayed_order: with_fallback(passed_on, replays, parts.engine.most_tokens)}
    prefilling = InProgress()
    if not parts.pushes:  # else the engine has the request before there is a first token
        ways[own_order] = routes[own_order] = _counted_until_first_token(ways[own_order], prefilling)
    auto = Auto(
        create_auto_decider(config.prefill_decider, sources, live.thresholds),
        routes,
        (own_order, relayed_order),
        fallback_local if _may_answer_alone(config) else None,
        stage.num_healthy,
        lambda: parts.engine.answering.count + prefilling.count < config.max_batch_size,
    )
    return StrategyRouter(ways | {"auto": auto}, deployed | {"auto": auto}, live.strategy, stage.check)


def _counted_until_first_token(generate: Generate, counter: InProgress) -> Generate:
    """Counts requests that a peer prefills, and that this worker's engine will decode."""

    def counted(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return CountedStream(counter.enter, partial(generate, request, context), until_first=True)

    return counted


def _own_orders(role: Role) -> list[str]:
    """The orders that have a worker of this role as first stage."""
    return [order.name for order in orders() if order.entry_role == role]


def _relayed_orders(role: Role) -> list[str]:
    """The orders for which a worker of this role relays the request to a worker of the other role."""
    return [order.name for order in orders() if order.entry_role != role]


def _relay_of_lost_engine(
    config: WorkerConfig, parts: StrategyParts, stage: StageClient
) -> list[FallbackStep]:
    """For a request that has lost this worker's engine: a worker of the other role answers it, in the other order."""
    order = _relayed_orders(parts.role)[0]
    step = FallbackStep(Fallback.OTHER_STAGE, relayed(stage, order), order, without_engine=True)
    return [step] * config.max_tries


def _orders_with_fallback_steps(
    config: WorkerConfig,
    parts: StrategyParts,
    stage: StageClient,
    local: Generate,
    relay: list[FallbackStep],
    replays: Replays,
) -> dict[str, Generate]:
    own_ways = {name: build_strategy(name, parts) for name in _own_orders(parts.role)}
    relays = {name: relayed(stage, name) for name in _relayed_orders(parts.role)}
    return {
        name: with_fallback(_fallback_steps(config, first, local, relay), replays, parts.engine.most_tokens)
        for name, first in (own_ways | relays).items()
    }


def _may_answer_alone(config: WorkerConfig) -> bool:
    """When the other stage fails."""
    return config.on_missing_stage == "local"


def _fallback_steps(
    config: WorkerConfig, first: Generate, local: Generate, relay: list[FallbackStep]
) -> list[FallbackStep]:
    """`first`, again on other instances; then this worker alone, if it may. `relay` is for a request that has lost this
    worker's engine.
    """
    steps = [FallbackStep(Fallback.OTHER_INSTANCE, first)] * config.max_tries
    if _may_answer_alone(config):
        steps.append(FallbackStep(Fallback.LOCAL, local, "local"))
    return steps + relay


def build_strategy(name: str, parts: StrategyParts) -> Generate:
    """The answer of a worker of the strategy's entry role to a whole request."""
    return spec_of(name).load_builder()(parts)


def served(parts: StrategyParts, whole: Generate) -> Generate:
    """`whole` for whole requests, and this role's phase for workers of the other role."""
    own = parts.role.value
    phase = _PHASES[parts.role](parts)

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        asked = request.phase_request
        if asked is None or asked.kind == "whole":
            return whole(request, context)
        if (Role.PREFILL if asked.is_notice else asked.kind) != own:
            raise PeerUnavailableError(f"a {own} worker was asked for the phase {asked.kind}")
        return phase(request, context)

    return generate


def _prefill(parts: StrategyParts) -> Generate:
    if parts.pushes:
        return push_service(LocalPush(parts.engine, parts.protocol))
    drain = RemoteDrain(parts.stage, parts.protocol)
    recalls = Recalls(parts.stage.instance_ids, parts.engine.handoffs.lease_seconds)
    return recallable(LocalPrefill(parts.engine, drain), recalls, parts.protocol)


def _decode(parts: StrategyParts) -> Generate:
    # The prefill worker has streamed the first token, so no client waits for the first one from here, and each chunk
    # saved here is saved there and in the frontend.
    notify = at_once if parts.pushes else FewTurnsLater()
    return decode_service(LocalDecode(parts.engine, repeats_first_token=parts.pushes, notify=notify))


_PHASES = {Role.PREFILL: _prefill, Role.DECODE: _decode}
