"""The composition of the two phases: a prefill, its first token, and a decode. (generation_first: `concurrent.py`.)"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from trtllm_disagg.errors import KvTransferError, StageTimeoutError
from trtllm_disagg.types import (
    DecodePhase,
    GenerateRequest,
    Handoff,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

#: Errors of a decode phase whose cause may be the worker that has the KV.
KV_NOT_ARRIVED = (KvTransferError, StageTimeoutError)


def _nothing(request: GenerateRequest) -> None:
    """Every request may begin."""


class Chain:
    """prefill_first: Chain(local prefill, remote decode); decode_first: Chain(remote prefill, local decode).

    The client gets the first token exactly once, straight from prefill and before any KV has moved; a decode phase
    in a chain drops its repeat of it. However the request ends, the prefill's KV is fetched or released.
    """

    def __init__(
        self,
        prefill: PrefillPhase,
        decode: DecodePhase,
        require: Callable[[GenerateRequest], None] = _nothing,
    ) -> None:
        """`require` raises a DisaggError before the prefill begins when no decode could follow it."""
        self._prefill = prefill
        self._decode = decode
        self._require = require

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        self._require(request)
        handoff = await self._prefill(request, context)
        try:
            if handoff.is_final:
                yield handoff.first
                return
            with request.span.child("handoff"):  # until the client has the first token
                yield handoff.first
            decode = self._decode(request.with_handoff(handoff), context, handoff)
            async with aclosing(decode):
                async for chunk in decode:
                    if handoff.of_prompt is not None and chunk.finish_reason is not None:
                        data = (chunk.engine_data or {}) | handoff.of_prompt
                        chunk = msgspec.structs.replace(chunk, engine_data=data)
                    yield chunk
        except KV_NOT_ARRIVED as error:
            error.blame(handoff.sender)
            raise
        finally:
            handoff.release()


class DecodeService:
    """The decode phase as a service, for a first stage or Dynamo's router, which sends the handoff and releases it."""

    def __init__(self, decode: DecodePhase) -> None:
        self._decode = decode

    def __call__(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return self._decode(request, context, Handoff.not_ours())


#: Called for each handoff that was delivered to the caller: (its request, a function that takes it back).
OnDelivered = Callable[[GenerateRequest, Callable[[], None]], None]


class PrefillService:
    """The prefill phase as a service: one chunk, with the first token and the handoff."""

    def __init__(
        self,
        prefill: PrefillPhase,
        protocol: HandoffProtocol = DYNAMO,
        on_delivered: OnDelivered = lambda request, take_back: None,
    ) -> None:
        self._prefill = prefill
        self._protocol = protocol
        self._on_delivered = on_delivered

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        handoff = await self._prefill(request, context)
        delivered = False
        try:
            with request.span.child("handoff"):
                yield self._protocol.answer(handoff, len(request.token_ids))
            delivered = not context.is_stopped()
        finally:
            if delivered and not handoff.is_final:
                self._on_delivered(request, handoff.caller_has_it())
            handoff.release()
