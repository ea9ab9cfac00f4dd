"""Composes the phases under generation_first: both run at once, and decode generates the whole answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import ConfigError, DisaggError, KvTransferError, PeerUnavailableError
from trtllm_disagg.handlers.cancellation import AbortGuard
from trtllm_disagg.handlers.chain import KV_NOT_ARRIVED, kv_lost
from trtllm_disagg.handlers.local import finished, only_chunk
from trtllm_disagg.handlers.peers import PREFILL, Call, Peers, dispatch_span, select_instance
from trtllm_disagg.types import DecodePhase, GenerateRequest, Handoff, Rendezvous, RequestContext, TokenChunk
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

#: Runs the prefill. Raises a DisaggError.
Push = Callable[[GenerateRequest, RequestContext], Awaitable[object]]


class Opened(NamedTuple):
    rendezvous: Rendezvous
    #: Runs on the prefill engine.
    push: Push
    #: The instance that prefills; None: this worker.
    sender: int | None = None
    #: Called when the KV did not arrive.
    on_lost: Callable[[], None] = lambda: None


#: Returns where decode meets the prefill engine, and the push that runs there meanwhile.
Open = Callable[[GenerateRequest], Awaitable[Opened]]


class LocalPush:
    """Runs context_only on this worker's engine. The client gets all tokens from decode, the first too."""

    def __init__(self, engine: Engine, protocol: HandoffProtocol = DYNAMO) -> None:
        """Raises ConfigError if decode engines cannot reach this engine."""
        self._engine = engine
        self._protocol = protocol
        if not engine.ctx_info_endpoint:
            raise ConfigError(
                "this engine has no ctx_info_endpoint, which --schedule-style generation_first needs"
            )
        self._endpoint = engine.ctx_info_endpoint
        self._rank = engine.ctx_dp_rank

    async def open_rendezvous(self, request: GenerateRequest) -> Opened:
        self._engine.require_fit(request)
        return Opened(self._protocol.adapt(self._engine.rendezvous(self._endpoint, self._rank)), self.push)

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        """Prefill for a decode worker that waits for the KV."""
        yield await self.push(request, context)

    async def push(self, request: GenerateRequest, context: RequestContext) -> TokenChunk:
        with request.span.child("prefill") as span:
            request = request.within(span)
            result = self._engine.start_prefill(request)
            await finished(self._engine, result, AbortGuard(self._engine, result, context), context)
            abandoned = KvTransferError("the engine abandoned the prefill")
            return only_chunk(self._engine, request, result, abandoned)


class RemotePush:
    """Runs context_only on a prefill worker, which pushes the KV to this worker's engine."""

    def __init__(self, peers: Peers, engine: Engine, protocol: HandoffProtocol = DYNAMO) -> None:
        """This worker's `engine` makes the rendezvous ids."""
        self._peers = peers
        self._protocol = protocol
        self._engine = engine

    async def open_rendezvous(self, request: GenerateRequest) -> Opened:
        # Refuse before either phase is dispatched.
        self._engine.require_fit(request, computes_prompt=False)
        call = await select_instance(self._peers, request, "prefill_instance")
        with call:
            endpoint, rank = self._peers.meeting_place(call)
        rendezvous = self._protocol.adapt(self._engine.rendezvous(endpoint, rank))
        forget = partial(self._peers.forget, call.instance_id)
        return Opened(rendezvous, partial(self._push, call), call.instance_id, forget)

    async def _push(self, call: Call, request: GenerateRequest, context: RequestContext) -> None:
        with call, dispatch_span(call, request) as dispatch:
            body = self._protocol.encode(request.within(dispatch), PREFILL)
            async with aclosing(call.answers(body, context)) as answers:
                num_answers = len([answer async for answer in answers])
            if num_answers != 1 and not context.is_stopped():
                raise PeerUnavailableError(f"the prefill worker sent {num_answers} answers instead of one")


class Concurrent:
    """prefill_first: Concurrent(local push, remote decode); decode_first: Concurrent(remote push, local decode).

    Dispatches both phases at once: decode allocates blocks and prefill writes into them. If one fails, the other is
    cancelled.
    """

    def __init__(self, open_rendezvous: Open, decode: DecodePhase) -> None:
        self._open = open_rendezvous
        self._decode = decode

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        with request.span.child("meet") as span:
            opened = await self._open(request.within(span))
        request = request.with_rendezvous(opened.rendezvous)
        pushing = asyncio.ensure_future(opened.push(request, context))
        try:
            # The engines transfer the KV themselves: there is nothing to release here.
            async with aclosing(self._decode(request, context, Handoff.not_ours())) as chunks:
                first = await _first_chunk(chunks, pushing)
                if first is None:
                    return
                yield first
                async for chunk in chunks:
                    yield chunk
        except KV_NOT_ARRIVED as error:
            opened.on_lost()
            raise kv_lost(error, opened.sender) from None
        finally:
            await _end(pushing)


async def _first_chunk(
    chunks: AsyncGenerator[TokenChunk, None], pushing: asyncio.Future[Any]
) -> TokenChunk | None:
    """Decode's first chunk; None if decode ends without one. Raises the error of a push that fails first."""
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
