"""The one composition: every disaggregated request is a prefill, its first token, and a decode."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from trtllm_disagg.handoff_protocols import DYNAMO, HandoffProtocol
from trtllm_disagg.types import (
    DecodePhase,
    Generate,
    GenerateRequest,
    Handoff,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)


def chain(prefill: PrefillPhase, decode: DecodePhase) -> Generate:
    """prefill_first: chain(local prefill, remote decode); decode_first: chain(remote prefill, local decode).

    The first token leaves here exactly once, straight from prefill and before any KV has moved; a decode
    phase in a chain drops its repeat of it. On every way out the prefill's KV is fetched or released.
    """

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        handoff = await prefill(request, context)
        try:
            yield handoff.first
            if not handoff.is_final:
                async with aclosing(decode(request.with_handoff(handoff), context, handoff)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        finally:
            handoff.release()

    return generate


def bare_decode(decode: DecodePhase) -> Generate:
    """The decode phase as a service, for a first stage or Dynamo's router that brings the handoff."""

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return decode(request, context, _SOMEBODY_ELSES)

    return generate


#: Whoever sent the request holds the duty to release.
_SOMEBODY_ELSES = Handoff(TokenChunk([]), None)


def bare_prefill(prefill: PrefillPhase, protocol: HandoffProtocol = DYNAMO) -> Generate:
    """The prefill phase as a service: one chunk, with the first token and the handoff."""

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        handoff = await prefill(request, context)
        delivered = False
        try:
            yield protocol.answer(handoff, len(request.token_ids))
            delivered = not context.is_stopped()
        finally:
            if delivered:
                handoff.taken()
            handoff.release()

    return generate
