"""The composition of the two phases: a prefill, its first token, and a decode. (generation_first: `concurrent.py`.)"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from trtllm_disagg.errors import KvTransferError, StageTimeoutError
from trtllm_disagg.streams import PerRequestStream
from trtllm_disagg.tracing.spans import Span
from trtllm_disagg.types import (
    DecodePhase,
    Generate,
    GenerateRequest,
    Handoff,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

#: Errors of a decode phase whose cause may be the worker that has the KV.
KV_NOT_ARRIVED = (KvTransferError, StageTimeoutError)


def chain(prefill: PrefillPhase, decode: DecodePhase) -> Generate:
    """prefill_first: chain(local prefill, remote decode); decode_first: chain(remote prefill, local decode).

    The client gets the first token exactly once, straight from prefill and before any KV has moved; a decode phase
    in a chain drops its repeat of it. However the request ends, the prefill's KV is fetched or released.
    """

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return _Chain(prefill, decode, request, context)

    return generate


class _Chain(PerRequestStream[TokenChunk]):
    def __init__(
        self,
        prefill: PrefillPhase,
        decode: DecodePhase,
        request: GenerateRequest,
        context: RequestContext,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._request = request
        self._context = context
        self._handoff: Handoff | None = None

    async def _first(self) -> TokenChunk:
        self._handoff = handoff = await self._prefill(self._request, self._context)
        if not handoff.is_final:
            span = self._request.span.child("handoff")
            decode = self._decode(self._request.with_handoff(handoff), self._context, handoff)
            if handoff.of_prompt is not None:
                decode = _ending_with(handoff.of_prompt, decode)
            self._rest = _AfterHandoff(span, decode, handoff.sender)
        return handoff.first

    async def _finish(self) -> None:
        if self._handoff is not None:
            self._handoff.release()


async def _ending_with(
    of_prompt: dict[str, Any], chunks: AsyncGenerator[TokenChunk, None]
) -> AsyncGenerator[TokenChunk, None]:
    """`chunks`, with `of_prompt` added to the `engine_data` of the last one."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.finish_reason is not None:
                chunk = msgspec.structs.replace(chunk, engine_data=(chunk.engine_data or {}) | of_prompt)
            yield chunk


class _AfterHandoff(PerRequestStream[TokenChunk]):
    """Decode, from when the client has the first token: the span `handoff` ends then."""

    def __init__(self, span: Span, decode: AsyncGenerator[TokenChunk, None], sender: int | None) -> None:
        """`sender` is to blame for KV that does not arrive."""
        self._span = span
        self._rest = decode
        self._sender = sender

    async def _first(self) -> TokenChunk:
        assert self._rest is not None
        self._span.end()
        try:
            return await anext(self._rest)
        except KV_NOT_ARRIVED as error:
            error.blame(self._sender)
            raise

    async def _finish(self) -> None:
        self._span.end()


def decode_service(decode: DecodePhase) -> Generate:
    """The decode phase as a service, for a first stage or Dynamo's router, which sends the handoff and releases it."""

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return decode(request, context, Handoff.not_ours())

    return generate


#: Called for each handoff that was delivered to the caller: (its request, a function that takes it back).
OnDelivered = Callable[[GenerateRequest, Callable[[], None]], None]


def prefill_service(
    prefill: PrefillPhase,
    protocol: HandoffProtocol = DYNAMO,
    on_delivered: OnDelivered = lambda request, take_back: None,
) -> Generate:
    """The prefill phase as a service: one chunk, with the first token and the handoff."""

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        handoff = await prefill(request, context)
        delivered = False
        try:
            with request.span.child("handoff"):
                yield protocol.answer(handoff, len(request.token_ids))
            delivered = not context.is_stopped()
        finally:
            if delivered and not handoff.is_final:
                on_delivered(request, handoff.caller_has_it())
            handoff.release()

    return generate
