"""The composition for schedule style generation_first: both phases at once, and decode has the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from trtllm_disagg.errors import DisaggError
from trtllm_disagg.handlers.pushing import PushPhase
from trtllm_disagg.types import DecodePhase, Generate, GenerateRequest, Handoff, RequestContext, TokenChunk


def together(prefill: PushPhase, decode: DecodePhase) -> Generate:
    """prefill_first: together(local push, remote decode); decode_first: together(remote push, local decode).

    Decode gives its blocks first, prefill writes into them. Both are dispatched here, so neither waits for the
    other to be asked; whichever fails ends the other.
    """

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        rendezvous, push = await prefill.meet(request)
        request = request.with_rendezvous(rendezvous)
        pushing = asyncio.ensure_future(push(request, context))
        try:
            async with aclosing(decode(request, context, _NO_HANDOFF)) as chunks:
                first = await _first_of(chunks, pushing)
                if first is not None:
                    yield first
                    async for chunk in chunks:
                        yield chunk
        finally:
            await _end(pushing)

    return generate


#: The engines hand the KV over among themselves.
_NO_HANDOFF = Handoff(TokenChunk([]), None)


async def _first_of(
    chunks: AsyncGenerator[TokenChunk, None], pushing: asyncio.Future[Any]
) -> TokenChunk | None:
    """Decode's first chunk, None when it has none. A push that fails before it ends the wait, with its error."""
    first = asyncio.ensure_future(anext(chunks, None))
    try:
        await asyncio.wait({first, pushing}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            pushing.result()
        return await first
    finally:
        await _end(first)


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, DisaggError):
        await task
