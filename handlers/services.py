"""What a worker answers: a frontend the whole request, a worker of the other role its phase or the whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from trtllm_disagg.config.worker_config import Role, Strategy, WorkerConfig
from trtllm_disagg.engine import Engine
from trtllm_disagg.errors import PeerUnavailableError
from trtllm_disagg.handlers.chain import bare_decode, bare_prefill
from trtllm_disagg.handlers.circuit_breaker import Breaker, WatchedStage, patience_of
from trtllm_disagg.handlers.concurrent import LocalPush, bare_push
from trtllm_disagg.handlers.decide import Auto, QueueDepth, conditional, create_decider
from trtllm_disagg.handlers.fallback import (
    Replays,
    Rung,
    always,
    ending_what_is_complete,
    going_on,
    ladder,
    only_if_it_must,
)
from trtllm_disagg.handlers.local import LocalBoth, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.parts import Parts
from trtllm_disagg.handlers.policy import Policy
from trtllm_disagg.handlers.remote import StageClient
from trtllm_disagg.handlers.route import Choice, relayed
from trtllm_disagg.handlers.select import AttendedQueue
from trtllm_disagg.handlers.strategies import ORDERS, build_strategy
from trtllm_disagg.handoff_protocols import choose_protocol
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


def build_generate(
    config: WorkerConfig,
    engine: Engine,
    stage: StageClient,
    policy: Policy | None = None,
    prefills: StageClient | None = None,
    waiting: QueueDepth | None = None,
) -> Generate:
    """How this worker answers a request. `stage` is the way to the workers of the other role; with a prefill queue
    `prefills` is that to whichever prefill worker has room, and `waiting` how many have waited for one.
    """
    policy = policy or Policy.of(config, config.kv_block_size)
    replays = always if engine.is_exact else only_if_it_must
    name = "agg" if config.role is Role.AGG else config.strategy.value
    if name in ("agg", Strategy.ROUTER):
        whole = _named(name, build_strategy(name, Parts(config.role, engine, stage)))
        # Under router, Dynamo's link is from the prefill worker to the decode worker.
        whole = ending_what_is_complete(whole)
        return whole if name == Strategy.ROUTER else going_on(whole, replays)
    breaker = Breaker(config.breaker_failures, config.breaker_seconds)
    patience = patience_of(config)
    watched = WatchedStage(stage, breaker, patience)
    parts = Parts(
        config.role,
        engine,
        watched,
        config.schedule_style,
        config.prefill_timeout,
        config.first_decode_token_timeout,
        choose_protocol(config.handoff_protocol),
        prefills and WatchedStage(_attended(config, prefills, stage), breaker, patience),
    )
    chosen = _chosen(config, parts, watched, waiting or watched, policy, replays)
    return going_on(ending_what_is_complete(served(parts, chosen)), replays)


def _attended(config: WorkerConfig, queue: StageClient, workers: StageClient) -> StageClient:
    """Under `local` nothing waits in it for a worker that is not there; a prefill worker is there itself."""
    waits = config.role is Role.PREFILL or config.on_missing_stage == "fail"
    return queue if waits else AttendedQueue(queue, workers)


def _chosen(
    config: WorkerConfig,
    parts: Parts,
    stage: WatchedStage,
    queue: QueueDepth,
    policy: Policy,
    replays: Replays,
) -> Choice:
    local = LocalBoth(parts.engine)
    own, other = sorted(ORDERS, key=lambda order: order.first_stage_role is not parts.role)

    across = relayed(stage, other)

    def with_fallback(whole: Generate) -> Generate:
        rungs = [Rung("other_instance", whole)] * config.max_tries
        if config.on_missing_stage == "local":
            rungs = [*rungs, Rung("local", local, "local")]
        rungs += [Rung("other_stage", across, other.value, without_engine=True)] * config.max_tries
        return ladder(rungs, replays)

    ways: dict[str, Generate] = {
        "local": local,
        own.value: with_fallback(build_strategy(own, parts)),
        other.value: with_fallback(across),
    }
    decider = create_decider(config.prefill_decider, policy.cached, queue, policy.thresholds)
    by_length = create_decider("length_and_queue", policy.cached, queue, policy.thresholds)
    auto = Auto(by_length, ways, (own.value, other.value), stage.num_well, config.max_batch_size)
    ways["auto"] = auto
    deployed = {order.value: conditional(decider, local, ways[order.value]) for order in ORDERS}
    return Choice(ways, deployed | {"auto": auto}, policy.strategy, stage.check)


def _named(name: str, whole: Generate) -> Generate:
    """Where there is no choice."""

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        request.journey.chose(name, "default")
        return whole(request, context)

    return generate


def served(parts: Parts, whole: Generate) -> Generate:
    """`whole`, and this role's phase for the workers of the other role."""
    own = parts.role.value
    phase = _PHASES[parts.role](parts)

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        errand = request.errand
        if errand is None or errand.stage == "whole":
            return whole(request, context)
        if errand.stage != own:
            raise PeerUnavailableError(f"a {own} worker was asked for the phase {errand.stage}")
        return phase(request, context)

    return generate


def _prefill(parts: Parts) -> Generate:
    if parts.pushes:
        return bare_push(LocalPush(parts.engine, parts.protocol))
    return bare_prefill(LocalPrefill(parts.engine), parts.protocol)


def _decode(parts: Parts) -> Generate:
    return bare_decode(LocalDecode(parts.engine, repeats_first_token=parts.pushes))


_PHASES = {Role.PREFILL: _prefill, Role.DECODE: _decode}
