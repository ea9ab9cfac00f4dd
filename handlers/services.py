"""Builds what a worker answers with, once at its start: no request asks which strategy runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig, flag_of
from trtllm_disagg.config.yaml_file import read_mapping
from trtllm_disagg.engine.capabilities import EXPORTS_CACHED
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.handlers.admission import Admission, FallbackBudget, Queued, most_tokens
from trtllm_disagg.handlers.answer import AnsweringWorker
from trtllm_disagg.handlers.attempts import Attempt, OneStrategy, Routes, WorkerSidePlan
from trtllm_disagg.handlers.chain import PrefillService
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker, stream_timeouts_of
from trtllm_disagg.handlers.concurrent import LocalPush
from trtllm_disagg.handlers.decide import (
    CachedPrefixes,
    FactSources,
    OtherOccupancy,
    OwnOccupancy,
    create_auto_decider,
    create_decider,
)
from trtllm_disagg.handlers.delivered import always_replay, replay_if_needed
from trtllm_disagg.handlers.local import LocalAgg, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.multi_turn import CachedService
from trtllm_disagg.handlers.outputs import FewTurnsLater, at_once
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.handlers.remote import RemoteAnswer, RemoteDrain
from trtllm_disagg.handlers.run import RunCounts
from trtllm_disagg.handlers.select import InFlight, SharedQueue, StageClient
from trtllm_disagg.handlers.trace import RequestSink
from trtllm_disagg.strategies import orders, spec_of
from trtllm_disagg.types import Fallback, Generate, GenerateRequest, InProgress
from trtllm_disagg.wire.handoff_protocols import HandoffProtocol, choose_protocol

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
    other_occupancy: OtherOccupancy = lambda: None

    @classmethod
    def of(
        cls, config: WorkerConfig, block_size: int, other_occupancy: OtherOccupancy = lambda: None
    ) -> LiveState:
        """`block_size` in tokens. Raises ConfigError when the policy file is wrong."""
        live = cls(
            Live(config.strategy),
            Live(Thresholds.of(config)),
            CachedPrefixes(block_size),
            CircuitBreaker(config.breaker_failures, config.breaker_seconds),
            other_occupancy=other_occupancy,
        )
        if (policy := config.policy_file) is not None:
            live.set_thresholds(read_mapping(Path(policy), flag_of("policy_file")), policy)
        return live

    def in_another_role(self, config: WorkerConfig, other_occupancy: OtherOccupancy) -> LiveState:
        """The same settings, and the same cache; nothing observed of requests and peers."""
        breaker = CircuitBreaker(config.breaker_failures, config.breaker_seconds)
        return LiveState(
            self.strategy, self.thresholds, self.cached, breaker, other_occupancy=other_occupancy
        )

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
    """What a strategy's builder gets: this worker's engine, and the workers of the other role."""

    config: WorkerConfig
    engine: Engine
    peers: Peers
    #: The prefill queue, under --prefill-dispatch queue.
    prefill_queue: Peers | None = None
    #: This worker's id in discovery.
    instance_id: int | None = None

    @property
    def pushes(self) -> bool:
        """Both phases are dispatched at once, and prefill writes into decode's blocks."""
        return self.config.schedule_style is ScheduleStyle.GENERATION_FIRST

    @property
    def protocol(self) -> HandoffProtocol:
        return choose_protocol(self.config.handoff_protocol)


def peers_of(
    config: WorkerConfig,
    stage: StageClient,
    breaker: CircuitBreaker | None = None,
    in_flight: InFlight | None = None,
    require_fit: Callable[[dict[str, Any]], None] | None = None,
) -> Peers:
    """The workers of the other role, with this configuration's timeouts."""
    breaker = breaker or CircuitBreaker(config.breaker_failures, config.breaker_seconds)
    prefill = config.role is not Role.PREFILL
    return Peers(stage, breaker, stream_timeouts_of(config), in_flight, require_fit, prefill=prefill)


def build_generate(
    config: WorkerConfig,
    engine: Engine,
    stage: StageClient | Peers,
    live: LiveState | None = None,
    queue: SharedQueue | None = None,
    instance_id: int | None = None,
    counts: RunCounts | None = None,
) -> AnsweringWorker:
    """What a worker answers requests with. `stage`: the workers of the other role; `instance_id`: this worker."""
    spec = spec_of(config.strategy)
    live = live or LiveState.of(config, config.kv_block_size)
    counts = counts or RunCounts(Admission(live.thresholds, live.queued))
    peers = stage if isinstance(stage, Peers) else peers_of(config, stage, live.breaker)
    replays = always_replay if engine.is_exact else replay_if_needed
    facts = PairFacts(config.role, engine.facts, peers.facts)
    parts = StrategyParts(config, engine, peers, _through(queue, config, peers), instance_id)
    if config.role is not Role.AGG and spec.is_worker_side:
        phase, notices = _phase(parts)
        plan = _worker_side_plan(parts, phase, live, facts, queue)
        return AnsweringWorker(plan, replays, True, facts, counts, notices)
    name = "agg" if config.role is Role.AGG else config.strategy
    attempt = Attempt(Fallback.OTHER_INSTANCE, build_strategy(name, parts))
    one = OneStrategy(name, attempt, is_split=config.role is not Role.AGG)
    # Under router, Dynamo's migration link goes from the prefill to the decode worker: it is not for us.
    return AnsweringWorker(one, replays, config.role is Role.AGG, facts, counts)


def _through(queue: SharedQueue | None, config: WorkerConfig, peers: Peers) -> Peers | None:
    """The prefill queue as a prefill is called through it; None under --prefill-dispatch direct."""
    if queue is None or queue.client is None:
        return None
    # A request waits in the prefill queue while there is no prefill worker: not under `--on-missing-stage local`. A
    # prefill worker needs no check: it pulls itself.
    if config.role is not Role.PREFILL and _may_answer_alone(config):
        queue.client.require(peers)
    return peers_of(config, queue.client, peers.breaker)


def _worker_side_plan(
    parts: StrategyParts,
    phase: Generate,
    live: LiveState,
    facts: PairFacts,
    queue: SharedQueue | None,
) -> WorkerSidePlan:
    """The attempts: `local`, each order of the two phases with its fallback steps, and `auto`. A deployment's own
    order has the decider before it, which may keep a request on this worker.
    """
    config = parts.config
    phases = {config.role.value: Attempt(Fallback.OTHER_INSTANCE, phase)}
    if EXPORTS_CACHED in parts.engine.capabilities and config.role is Role.DECODE:
        phases["cached"] = Attempt(Fallback.OTHER_INSTANCE, CachedService(parts.engine))
    depth = parts.peers.depth if parts.prefill_queue is None or queue is None else queue.depth
    sources = FactSources(config.role, live.cached, depth, live.occupancy, live.other_occupancy)
    thresholds, prefilling = live.thresholds, InProgress()

    def has_room() -> bool:
        return parts.engine.answering.count + prefilling.count < config.max_batch_size

    return WorkerSidePlan(
        config.role.value,
        phases,
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
    """`prefilling` counts requests that a peer prefills, and that this worker's engine will decode."""
    config, local, to = parts.config, LocalAgg(parts.engine), Fallback.OTHER_INSTANCE
    own_orders = [order.name for order in orders() if order.entry_role == config.role]
    relayed_orders = [order.name for order in orders() if order.entry_role != config.role]
    own, relayed = own_orders[0], relayed_orders[0]
    # In place of the other stage; and what answers a request that has lost this worker's engine.
    alone = [Attempt(Fallback.LOCAL, local, "local", enter=budget.enter)] if _may_answer_alone(config) else []
    other_stage = RemoteAnswer(parts.peers, relayed)
    lost = [Attempt(Fallback.OTHER_STAGE, other_stage, relayed, without_engine=True)] * config.max_tries
    # A full prefill worker can still prefill.
    full = parts.instance_id if config.role is Role.DECODE else None

    def route(first: Attempt) -> list[Attempt]:
        return [first] * config.max_tries + alone + lost

    def keep(request: GenerateRequest) -> Callable[[], None]:
        return sources.kept.enter(most_tokens(request))

    by_name = {
        **{name: route(Attempt(to, build_strategy(name, parts))) for name in own_orders},
        **{name: route(Attempt(to, RemoteAnswer(parts.peers, name))) for name in relayed_orders},
        "local": [Attempt(Fallback.LOCAL, local, "local", enter=keep), *lost],
    }
    if not parts.pushes:  # else the engine has the request before there is a first token
        first = by_name[own][0]._replace(enter=lambda request: prefilling.enter(), until_first=True)
        by_name[own] = route(first)
    busy = route(Attempt(to, RemoteAnswer(parts.peers, relayed, full)))
    return Routes(by_name, own, relayed, busy, alone[0] if alone else None)


def _may_answer_alone(config: WorkerConfig) -> bool:
    """When the other stage fails."""
    return config.on_missing_stage == "local"


def build_strategy(name: str, parts: StrategyParts) -> Generate:
    """The answer of a worker of the strategy's entry role to a whole request."""
    return spec_of(name).load_builder()(parts)


def _phase(parts: StrategyParts) -> tuple[Generate, Recalls | None]:
    """(this role's phase as a service for workers of the other role, what gets their notices)"""
    if parts.config.role is Role.DECODE:
        # The prefill worker has streamed the first token, so no client waits for the first one from here, and each
        # chunk saved here is saved there and in the frontend.
        decode = LocalDecode(
            parts.engine,
            repeats_first_token=parts.pushes,
            notify=at_once if parts.pushes else FewTurnsLater(),
            max_batch_size=parts.config.max_batch_size,
        )
        return decode, None
    if parts.pushes:
        return LocalPush(parts.engine, parts.protocol), None
    recalls = Recalls(parts.peers.instance_ids, parts.engine.handoffs.lease_seconds)
    prefill = LocalPrefill(parts.engine, RemoteDrain(parts.peers, parts.protocol))
    return PrefillService(prefill, recalls, parts.protocol), recalls
