"""Who asks what of a worker: a frontend the whole answer, a worker of the other role its phase or the whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from trtllm_disagg.config import Role, Strategy, WorkerConfig
from trtllm_disagg.engine import Engine
from trtllm_disagg.errors import PeerUnavailableError
from trtllm_disagg.handlers.chain import bare_decode, bare_prefill
from trtllm_disagg.handlers.local import LocalDecode, LocalPrefill
from trtllm_disagg.handlers.parts import Parts
from trtllm_disagg.handlers.pushing import LocalPush, bare_push
from trtllm_disagg.handlers.remote import StageClient
from trtllm_disagg.handlers.strategies import build_strategy
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


def build_generate(
    config: WorkerConfig, engine: Engine, stage: StageClient, prefills: StageClient | None = None
) -> Generate:
    """How this worker answers a request. `stage` is the way to the workers of the other role, `prefills` that
    to whichever prefill worker has room.
    """
    parts = Parts(config.role, engine, stage, config.schedule_style, prefills)
    if config.role is Role.AGG:
        return build_strategy("agg", parts)
    if config.strategy is Strategy.ROUTER:
        return build_strategy("router", parts)
    return served(parts, _whole(config.strategy, parts))


def _whole(strategy: Strategy, parts: Parts) -> Generate:
    if strategy.first_stage_role is parts.role:
        return build_strategy(strategy, parts)
    return _refuse_whole


def served(parts: Parts, whole: Generate) -> Generate:
    """`whole`, and this role's phase for the workers of the other role."""
    own = {Role.PREFILL: "prefill", Role.DECODE: "decode"}[parts.role]
    phase = _PHASES[parts.role](parts)

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        errand = request.errand
        if errand is None or errand.stage == "whole":
            return whole(request, context)
        if errand.stage != own:
            raise PeerUnavailableError(f"a {parts.role} worker was asked for the phase {errand.stage}")
        return phase(request, context)

    return generate


def _prefill(parts: Parts) -> Generate:
    if parts.pushes:
        return bare_push(LocalPush(parts.engine))
    return bare_prefill(LocalPrefill(parts.engine))


def _decode(parts: Parts) -> Generate:
    return bare_decode(LocalDecode(parts.engine, repeats_first_token=parts.pushes))


_PHASES = {Role.PREFILL: _prefill, Role.DECODE: _decode}


def _refuse_whole(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
    raise PeerUnavailableError("this worker is a second stage; it answers no whole request")
