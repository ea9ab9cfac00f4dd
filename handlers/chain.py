"""Composes the two phases: prefill, its first token, decode. (generation_first: `concurrent.py`.)"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError, StageTimeoutError
from trtllm_disagg.handlers.peers import PREFILL
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.types import DecodePhase, GenerateRequest, PrefillPhase, RequestContext, TokenChunk
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol
from trtllm_disagg.wire.images import with_handoff

#: Decode errors that the worker with the KV may have caused.
KV_NOT_ARRIVED = (KvTransferError, HandoffRefusedError, StageTimeoutError)


def kv_lost(error: DisaggError, sender: int | None) -> DisaggError:
    """Blame the sender. A refused handoff came from no client: it shows that the two workers do not fit."""
    error.blame(sender)
    lost = KvTransferError(str(error)) if isinstance(error, HandoffRefusedError) else error
    lost.blame(error.peer)
    return lost


class Chain:
    """prefill_first: Chain(local prefill, remote decode); decode_first: Chain(remote prefill, local decode).

    The client gets the first token once, from prefill, before any KV has moved; decode drops its repeat. However the
    request ends, the prefill's KV is fetched or released.
    """

    def __init__(
        self,
        prefill: PrefillPhase,
        decode: DecodePhase,
        require: Callable[[GenerateRequest], None] | None = None,
        uncached: Callable[[GenerateRequest], GenerateRequest] = lambda request: request,
    ) -> None:
        """`require` raises a DisaggError before a prefill that no decode can follow. `uncached`: `Engine.uncached`."""
        self._prefill = prefill
        self._decode = decode
        self._require = require
        self._uncached = uncached

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        if self._require is not None:
            self._require(request)
        request = self._uncached(request)
        handoff = await self._prefill(request, context)
        try:
            if handoff.is_final:
                yield handoff.first
                return
            with request.span.child("handoff"):  # until the client has the first token
                yield handoff.first
            decode = self._decode(with_handoff(request, handoff), context, handoff)
            async with aclosing(decode):
                async for chunk in decode:
                    if handoff.of_prompt is not None and chunk.finish_reason is not None:
                        data = (chunk.engine_data or {}) | handoff.of_prompt
                        chunk = msgspec.structs.replace(chunk, engine_data=data)
                    yield chunk
        except KV_NOT_ARRIVED as error:
            raise kv_lost(error, handoff.sender) from None
        finally:
            handoff.release()


class PrefillService:
    """Serves the prefill phase to another worker or Dynamo's router: one chunk with first token and handoff."""

    def __init__(self, prefill: PrefillPhase, recalls: Recalls, protocol: HandoffProtocol = DYNAMO) -> None:
        self._prefill = prefill
        self._recalls = recalls
        self._protocol = protocol

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        asked, recalls = request.phase_request or PREFILL, self._recalls
        recalls.fetched(asked.fetched)
        recalls.begin(asked.attempts)
        try:
            handoff = await self._prefill(request, context)
        finally:
            recalls.end(asked.attempts)
        delivered = False
        try:
            with request.span.child("handoff"):
                yield self._protocol.answer(handoff, request.num_prompt)
            delivered = not context.is_stopped()
        finally:
            if delivered and not handoff.is_final:
                recalls.answered(asked, handoff.caller_has_it())
            handoff.release()
