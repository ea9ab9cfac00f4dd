"""Builds a worker's answering functions once, at its start, so no request has to ask which strategy runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig, flag_of
from trtllm_disagg.engine.capabilities import block_size_of, reuses_blocks
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.handlers.admission import Admission, FallbackBudget, max_total_tokens
from trtllm_disagg.handlers.answer import AnsweringWorker
from trtllm_disagg.handlers.attempts import (
    FIRST,
    Attempt,
    ChainingPlan,
    FactSources,
    OneStrategy,
    Routes,
    create_auto_decider,
    create_decider,
)
from trtllm_disagg.handlers.cached_prefix import CachedPrefixes
from trtllm_disagg.handlers.chain import PrefillService
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.concurrent import LocalPush
from trtllm_disagg.handlers.delivered import always_replay, replay_if_needed
from trtllm_disagg.handlers.idle_timeout import stream_timeouts_of
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.handlers.local import LocalAgg, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.multi_turn import NextTurns, PrefillOfCached, PullBack
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.queued import PrefillQueue
from trtllm_disagg.handlers.recall import Notices, Recalls
from trtllm_disagg.handlers.remote import RemoteAnswer, RemoteDrain, RemotePrefill
from trtllm_disagg.handlers.run import RunCounts
from trtllm_disagg.handlers.selection import InFlight, StageClient
from trtllm_disagg.strategies import orders, spec_of
from trtllm_disagg.types import Fallback, Generate, GenerateRequest, InProgress
from trtllm_disagg.wire.handoff_protocols import HandoffProtocol, choose_protocol

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StrategyParts:
    """What a strategy's builder gets: configuration, engine, peers, prefill queue and state."""

    config: WorkerConfig
    engine: Engine
    peers: Peers
    #: The prefill queue, under --prefill-dispatch queue.
    prefill_queue: PrefillQueue | None = None
    #: This worker's id in discovery.
    instance_id: int | None = None

    @property
    def pushes(self) -> bool:
        """Both phases are dispatched at once; prefill writes into decode's blocks."""
        return self.config.schedule_style is ScheduleStyle.GENERATION_FIRST

    @property
    def protocol(self) -> HandoffProtocol:
        """The format of bodies between the stages."""
        return choose_protocol(self.config.handoff_protocol)


def peers_of(
    config: WorkerConfig,
    stage: StageClient,
    breaker: CircuitBreaker | None = None,
    in_flight: InFlight | None = None,
    require_fit: Callable[[dict[str, Any]], None] | None = None,
) -> Peers:
    """This worker's peers, with the configuration's timeouts."""
    breaker = breaker or CircuitBreaker(config.breaker_failures, config.breaker_seconds)
    prefill = config.role is not Role.PREFILL
    return Peers(stage, breaker, stream_timeouts_of(config), in_flight, require_fit, prefill=prefill)


def build_generate(
    config: WorkerConfig,
    engine: Engine,
    stage: StageClient | Peers,
    live: LiveState | None = None,
    queue: PrefillQueue | None = None,
    instance_id: int | None = None,
    counts: RunCounts | None = None,
) -> AnsweringWorker:
    """The function that answers a worker's requests. `stage`: its peers; `instance_id`: its own."""
    spec = spec_of(config.strategy)
    live = live or LiveState.of(config, config.kv_block_size)
    counts = counts or RunCounts(Admission(live.thresholds, live.queued))
    peers = stage if isinstance(stage, Peers) else peers_of(config, stage, live.breaker)
    replays = always_replay if engine.is_exact else replay_if_needed
    facts = PairFacts(config.role, engine.facts, peers.facts)
    parts = StrategyParts(config, engine, peers, queue, instance_id)
    if config.role is not Role.AGG and spec.is_run_by_workers:
        phases, notices = _phases(parts, live.cached)
        plan, turns = _chaining_plan(parts, phases, live, facts), _next_turns(parts)
        return AnsweringWorker(plan, replays, True, facts, counts, notices, engine.require_choices, turns)
    name = "agg" if config.role is Role.AGG else config.strategy
    attempt = Attempt(FIRST, build_strategy(name, parts))
    one = OneStrategy(name, attempt, is_split=config.role is not Role.AGG)
    # Under router, Dynamo passes the migration link from prefill to decode worker: it is not ours. The router gets one
    # prefill answer for all choices.
    several = None if config.role is Role.PREFILL else engine.require_choices
    return AnsweringWorker(one, replays, config.role is Role.AGG, facts, counts, require_choices=several)


def _chaining_plan(
    parts: StrategyParts, phases: dict[str, Generate], live: LiveState, facts: PairFacts
) -> ChainingPlan:
    """The plan with `local`, both orders with their fallback steps, and `auto`. The deployment's own order asks its
    decider first, which may keep a request on this worker.
    """
    config = parts.config
    depth = (parts.prefill_queue.requests if parts.prefill_queue is not None else parts.peers).depth
    sources = FactSources(config.role, live.cached, depth, live.occupancy, live.other_occupancy)
    thresholds, prefilling = live.thresholds, InProgress()

    def has_room() -> bool:
        return parts.engine.answering.count + prefilling.count < config.max_batch_size

    return ChainingPlan(
        config.role.value,
        {name: Attempt(FIRST, phase) for name, phase in phases.items()},
        _routes(parts, FallbackBudget(thresholds), sources, prefilling),
        create_decider(config.prefill_decider, sources, thresholds),
        create_auto_decider(config.prefill_decider, sources, thresholds),
        live.strategy,
        parts.peers,
        facts,
        has_room,
        gets_prompt_logprobs=not parts.pushes,
    )


def _routes(
    parts: StrategyParts, budget: FallbackBudget, sources: FactSources, prefilling: InProgress
) -> Routes:
    """`prefilling` counts requests that a peer prefills for this worker's engine."""
    config, local = parts.config, LocalAgg(parts.engine)
    own_orders = [order.name for order in orders() if order.entry_role == config.role]
    relayed_orders = [order.name for order in orders() if order.entry_role != config.role]
    own, relayed = own_orders[0], relayed_orders[0]
    # Without the other stage; and after this worker's engine died.
    alone = [Attempt(Fallback.LOCAL, local, "local", enter=budget.enter)] if _may_answer_alone(config) else []
    other_stage = RemoteAnswer(parts.peers, relayed)
    lost = [Attempt(Fallback.OTHER_STAGE, other_stage, relayed, without_engine=True)] * config.max_tries
    # A full prefill worker can still prefill.
    full = parts.instance_id if config.role is Role.DECODE else None

    def route(first: Attempt) -> list[Attempt]:
        again = first._replace(name=Fallback.OTHER_INSTANCE)
        return [first] + [again] * (config.max_tries - 1) + alone + lost

    def keep(request: GenerateRequest) -> Callable[[], None]:
        return sources.kept.enter(max_total_tokens(request))

    by_name = {
        **{name: route(Attempt(FIRST, build_strategy(name, parts))) for name in own_orders},
        **{name: route(Attempt(FIRST, RemoteAnswer(parts.peers, name))) for name in relayed_orders},
        "local": [Attempt(FIRST, local, "local", enter=keep), *lost],
    }
    if not parts.pushes:  # else the engine has the request before the first token
        first = by_name[own][0]._replace(enter=lambda request: prefilling.enter(), until_first=True)
        by_name[own] = route(first)
    busy = route(Attempt(FIRST, RemoteAnswer(parts.peers, relayed, full)))
    return Routes(by_name, own, relayed, busy, alone[0] if alone else None)


def _may_answer_alone(config: WorkerConfig) -> bool:
    """When the other stage fails."""
    return config.on_missing_stage == "local"


def build_strategy(name: str, parts: StrategyParts) -> Generate:
    """Answers a whole request on a worker of the strategy's entry role."""
    return spec_of(name).load_builder()(parts)


def _phases(parts: StrategyParts, cached: CachedPrefixes) -> tuple[dict[str, Generate], Recalls | None]:
    """(this role's phases as services for its peers, by name; the receiver of their notices)"""
    recalls = Recalls(parts.peers.instance_ids, parts.engine.handoffs.lease_seconds)
    if parts.config.role is Role.DECODE:
        max_batch = parts.config.max_batch_size
        decode = LocalDecode(parts.engine, repeats_first_token=parts.pushes, max_batch_size=max_batch)
        if parts.pushes:
            return {"decode": decode}, None
        # Each rank has its own cache, and the engine chooses the rank.
        known = cached if parts.engine.num_ranks == 1 else CachedPrefixes(cached.block_size)
        again = PrefillOfCached(LocalPrefill(parts.engine, sees_callers_max_tokens=False), known, recalls)
        return {"decode": decode, "prefill": PrefillService(again, recalls, parts.protocol)}, recalls
    if parts.pushes:
        return {"prefill": LocalPush(parts.engine, parts.protocol)}, None
    prefill = LocalPrefill(parts.engine, RemoteDrain(parts.peers, parts.protocol))
    return {"prefill": PrefillService(prefill, recalls, parts.protocol)}, recalls


def _next_turns(parts: StrategyParts) -> NextTurns:
    """Raises ConfigError for --pull-min-tokens on an engine that cannot keep the blocks or find them again."""
    config, engine, least = parts.config, parts.engine, parts.config.pulls_from
    # With the prefill queue, the worker of the next turn is not known in advance.
    if config.role is not Role.PREFILL or not least or parts.prefill_queue is not None:
        return NextTurns()
    if engine.num_ranks > 1 or not reuses_blocks(engine.llm):
        if config.is_explicit("pull_min_tokens"):
            allowed = "0 without kv_cache_config.enable_block_reuse, and with enable_attention_dp"
            raise ConfigError.bad_value(flag_of("pull_min_tokens"), least, allowed)
        return NextTurns()
    notices = Notices(parts.instance_id, recalls_unused=True)
    prefill = RemotePrefill(parts.peers, lambda request: None, notices, parts.protocol)
    size = block_size_of(engine.llm) or config.kv_block_size
    return PullBack(parts.peers, prefill, engine, size, least)
