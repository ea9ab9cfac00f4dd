"""router: Dynamo's frontend chains prefill and decode itself (its PrefillRouter); no worker calls another."""

import asyncio
from collections.abc import AsyncGenerator

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.handlers.chain import PrefillService
from trtllm_disagg.handlers.choices import choices_of
from trtllm_disagg.handlers.local import LocalAgg, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.handlers.remote import RemoteDrain
from trtllm_disagg.handlers.services import StrategyParts
from trtllm_disagg.types import (
    Choice,
    Generate,
    GenerateRequest,
    Handoff,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)


def build(parts: StrategyParts) -> Generate:
    if parts.config.role is Role.DECODE:
        return DecodeOrAgg(parts)
    # A decode worker runs a drain like any request with a handoff.
    drain = RemoteDrain(parts.peers)
    prefill = LocalPrefill(parts.engine, drain, sees_callers_max_tokens=False)
    return PrefillService(
        PrefillOfEach(prefill, parts.engine), Recalls(tuple, parts.engine.handoffs.lease_seconds)
    )


class PrefillOfEach:
    """Runs a prefill per choice. The first handoff carries the others, since the router passes on one. If a choice's
    first token ends it, decode computes that choice again; if it is the first choice, all choices.
    """

    def __init__(self, prefill: PrefillPhase, engine: Engine) -> None:
        self._prefill = prefill
        self._engine = engine

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        if request.num_choices == 1:
            return await self._prefill(request, context)
        self._engine.require_choices(request)
        made: dict[int, Handoff] = {}

        def release(_: Handoff | None = None) -> None:
            for handoff in made.values():
                handoff.release()

        async def add(choice: Choice, one: GenerateRequest) -> None:
            made[choice.index] = await self._prefill(one, context)

        first, *others = choices_of(request).items()
        try:
            await add(*first)
            if made[0].result is None:
                return made[0]
            async with asyncio.TaskGroup() as group:
                for other in others:
                    group.create_task(add(*other))
        except BaseException as error:
            release()
            raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error from None
        result = made[0].result.with_choices([made[choice.index].result for choice, _ in others])
        return Handoff(made[0].first, result, on_release=release, of_prompt=made[0].of_prompt)


class DecodeOrAgg:
    """Answers requests without a handoff alone: the router skips prefill when decode has cached most of the prompt."""

    def __init__(self, parts: StrategyParts) -> None:
        self._decode = LocalDecode(parts.engine, repeats_first_token=True)
        self._agg = LocalAgg(parts.engine)

    def __call__(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return (self._agg if request.prefill_result is None else self._decode)(request, context)
