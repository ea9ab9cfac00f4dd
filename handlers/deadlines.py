"""Deadlines of the phases that run on this worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.types import (
    DecodePhase,
    GenerateRequest,
    Handoff,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)


def prefill_within(seconds: float, prefill: PrefillPhase) -> PrefillPhase:
    """Raises StageTimeoutError; leaving the phase aborts it."""

    async def timed(request: GenerateRequest, context: RequestContext) -> Handoff:
        try:
            async with asyncio.timeout(seconds):
                return await prefill(request, context)
        except TimeoutError:
            raise StageTimeoutError(f"the prefill was not done within {seconds:g} s") from None

    return timed


def first_token_within(seconds: float, decode: DecodePhase) -> DecodePhase:
    """The transfer of the KV is in that time."""

    async def timed(
        request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        async with aclosing(decode(request, context, handoff)) as chunks:
            try:
                async with asyncio.timeout(seconds):
                    first = await anext(chunks, None)
            except TimeoutError:
                raise StageTimeoutError(f"decode gave no token within {seconds:g} s") from None
            if first is not None:
                yield first
                async for chunk in chunks:
                    yield chunk

    return timed
