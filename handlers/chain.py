"""The composition of the two phases: a prefill, its first token, and a decode. (generation_first: `concurrent.py`.)"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from trtllm_disagg.errors import DisaggError, HandoffRefusedError, KvTransferError, StageTimeoutError
from trtllm_disagg.handlers.multi_turn import PullBack
from trtllm_disagg.handlers.peers import PREFILL
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.types import (
    DecodePhase,
    GenerateRequest,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

#: Errors of a decode phase whose cause may be the worker that has the KV.
KV_NOT_ARRIVED = (KvTransferError, HandoffRefusedError, StageTimeoutError)


def kv_lost(error: DisaggError, sender: int | None) -> DisaggError:
    """The error, which blames the sender. No client has sent a handoff that is refused: the two workers do not fit."""
    error.blame(sender)
    lost = KvTransferError(str(error)) if isinstance(error, HandoffRefusedError) else error
    lost.blame(error.peer)
    return lost


class Chain:
    """prefill_first: Chain(local prefill, remote decode); decode_first: Chain(remote prefill, local decode).

    The client gets the first token exactly once, straight from prefill and before any KV has moved; a decode phase
    in a chain drops its repeat of it. However the request ends, the prefill's KV is fetched or released.
    """

    def __init__(
        self,
        prefill: PrefillPhase,
        decode: DecodePhase,
        require: Callable[[GenerateRequest], None] | None = None,
        pull: PullBack | None = None,
    ) -> None:
        """`require` raises a DisaggError before the prefill begins when no decode could follow it. `pull` is told which
        decode worker has generated what, and makes use of it for the next turn.
        """
        self._prefill = prefill
        self._decode = decode
        self._require = require
        self._pull = pull

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        if self._require is not None:
            self._require(request)
        if self._pull is not None:
            request = await self._pull(request, context)
        handoff = await self._prefill(request, context)
        generated = list(handoff.first.token_ids)
        try:
            if handoff.is_final:
                yield handoff.first
                return
            with request.span.child("handoff"):  # until the client has the first token
                yield handoff.first
            decode = self._decode(request.with_handoff(handoff), context, handoff)
            async with aclosing(decode):
                async for chunk in decode:
                    if self._pull is not None:
                        generated += chunk.token_ids
                    if handoff.of_prompt is not None and chunk.finish_reason is not None:
                        data = (chunk.engine_data or {}) | handoff.of_prompt
                        chunk = msgspec.structs.replace(chunk, engine_data=data)
                    yield chunk
        except KV_NOT_ARRIVED as error:
            raise kv_lost(error, handoff.sender) from None
        finally:
            handoff.release()
            if self._pull is not None and handoff.receiver is not None:
                self._pull.remember(request, generated, handoff.receiver)


class PrefillService:
    """The prefill phase as a service, for another worker or Dynamo's router: one chunk, with the first token and the
    handoff.
    """

    def __init__(self, prefill: PrefillPhase, recalls: Recalls, protocol: HandoffProtocol = DYNAMO) -> None:
        self._prefill = prefill
        self._recalls = recalls
        self._protocol = protocol

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        asked, recalls = request.phase_request or PREFILL, self._recalls
        recalls.taken(asked.taken)
        recalls.begin(asked.attempts)
        try:
            handoff = await self._prefill(request, context)
        finally:
            recalls.end(asked.attempts)
        delivered = False
        try:
            with request.span.child("handoff"):
                yield self._protocol.answer(handoff, len(request.token_ids))
            delivered = not context.is_stopped()
        finally:
            if delivered and not handoff.is_final:
                recalls.answered(asked, handoff.caller_has_it())
            handoff.release()
