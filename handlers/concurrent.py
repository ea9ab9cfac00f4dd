"""The composition for schedule style generation_first: both phases run at once, and decode makes the whole answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    KvTransferError,
    PeerUnavailableError,
    RequestCancelledError,
)
from trtllm_disagg.handlers.cancellation import AbortGuard
from trtllm_disagg.handlers.chain import KV_NOT_ARRIVED
from trtllm_disagg.handlers.local import finished
from trtllm_disagg.handlers.outputs import OutputCursor, record_engine
from trtllm_disagg.handlers.remote import (
    PREFILL,
    StageClient,
    StageInstance,
    blaming,
    dispatch_span,
    select_instance,
)
from trtllm_disagg.handlers.trace import record_cache_hit
from trtllm_disagg.streams import PerRequestStream
from trtllm_disagg.types import (
    DecodePhase,
    Generate,
    GenerateRequest,
    Handoff,
    Int32,
    Rendezvous,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

#: Runs the prefill to its end. Raises a DisaggError.
Push = Callable[[GenerateRequest, RequestContext], Awaitable[object]]


class Opened(NamedTuple):
    rendezvous: Rendezvous
    #: Runs on the prefill engine.
    push: Push
    #: The instance that prefills; None: this worker.
    sender: int | None = None


class PushPhase(Protocol):
    """A prefill phase that writes into a decode engine's blocks, while that engine's decode phase waits for them."""

    async def open_rendezvous(self, request: GenerateRequest) -> Opened:
        """Return where decode finds the prefill engine, and the push that will run on that engine."""
        ...


class LocalPush:
    """context_only on this worker's engine. The client gets all tokens, the first one too, from decode."""

    def __init__(self, engine: Engine, protocol: HandoffProtocol = DYNAMO) -> None:
        """Raises ConfigError for an engine that no decode engine can reach."""
        self._engine = engine
        self._protocol = protocol
        if not engine.ctx_info_endpoint:
            raise ConfigError(
                "this engine has no ctx_info_endpoint, which --schedule-style generation_first needs"
            )
        self._endpoint = engine.ctx_info_endpoint
        self._rank = engine.ctx_dp_rank

    async def open_rendezvous(self, request: GenerateRequest) -> Opened:
        self._engine.require_room(request)
        return Opened(self._protocol.adapt(self._engine.rendezvous(self._endpoint, self._rank)), self)

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> TokenChunk:
        with request.span.child("prefill") as span:
            return await self._run(request.within(span), context)

    async def _run(self, request: GenerateRequest, context: RequestContext) -> TokenChunk:
        result = self._engine.start_prefill(request)
        await finished(self._engine, result, AbortGuard(self._engine, result, context))
        chunks = OutputCursor(len(request.token_ids)).advance(result)
        if not chunks or chunks[0].finish_reason == "cancelled":
            if context.is_stopped():
                raise RequestCancelledError("the client left during prefill")
            raise KvTransferError("the engine has abandoned the prefill")
        record_cache_hit(request, result)
        record_engine(self._engine, request, result)
        return chunks[0]


class RemotePush:
    """context_only on a prefill worker, which pushes into this worker's engine."""

    def __init__(self, client: StageClient, engine: Engine, protocol: HandoffProtocol = DYNAMO) -> None:
        """`engine` is this worker's: it makes the ids of rendezvous."""
        self._client = client
        self._protocol = protocol
        self._engine = engine
        #: Of each instance, for as long as it lives: where its engine is met, and on which rank.
        self._places: dict[int, tuple[str, int | None]] = {}

    async def open_rendezvous(self, request: GenerateRequest) -> Opened:
        # Refused here, before either phase is dispatched.
        self._engine.require_room(request)
        instance = await select_instance(self._client, request)
        request.trace.facts["prefill_instance"] = f"{instance.instance_id:x}"
        endpoint, rank = self._places.get(instance.instance_id) or await self._place_of(instance)
        rendezvous = self._protocol.adapt(self._engine.rendezvous(endpoint, rank))
        return Opened(rendezvous, partial(self._call, instance), instance.instance_id)

    async def _place_of(self, instance: StageInstance) -> tuple[str, int | None]:
        described = await instance.describe()
        with blaming(instance):
            place = _place_in(described)
        there = {*self._client.instance_ids(), instance.instance_id}
        self._places = {each: place for each, place in self._places.items() if each in there}
        self._places[instance.instance_id] = place
        return place

    async def _call(self, instance: StageInstance, request: GenerateRequest, context: RequestContext) -> None:
        with blaming(instance), dispatch_span(instance, request) as dispatch:
            raw = self._protocol.encode(request.within(dispatch), PREFILL)
            async with aclosing(instance.call(raw, context)) as answers:
                num_answers = len([answer async for answer in answers])
            if num_answers != 1 and not context.is_stopped():
                raise PeerUnavailableError(f"the prefill worker sent {num_answers} answers instead of one")


class _Place(msgspec.Struct, frozen=True):
    """The part of a prefill worker's description that says where its engine is met."""

    ctx_info_endpoint: str | None = None
    ctx_dp_rank: Int32 | None = None


def _place_in(described: dict[str, Any]) -> tuple[str, int | None]:
    try:
        place = msgspec.convert(described, _Place)
    except msgspec.ValidationError as error:
        raise PeerUnavailableError(f"the prefill worker's description is unreadable: {error}") from None
    if not place.ctx_info_endpoint:
        raise PeerUnavailableError("the prefill worker's engine has no ctx_info_endpoint")
    return place.ctx_info_endpoint, place.ctx_dp_rank


def push_service(push: LocalPush) -> Generate:
    """The push phase as a service, for a decode worker that waits for the KV."""

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        yield await push(request, context)

    return generate


def concurrent(prefill: PushPhase, decode: DecodePhase) -> Generate:
    """prefill_first: concurrent(local push, remote decode); decode_first: concurrent(remote push, local decode).

    Decode allocates blocks and prefill writes into them. Both phases are dispatched here, at once; when one fails
    the other is cancelled.
    """

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return _Concurrent(prefill, decode, request, context)

    return generate


class _Concurrent(PerRequestStream[TokenChunk]):
    def __init__(
        self, prefill: PushPhase, decode: DecodePhase, request: GenerateRequest, context: RequestContext
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._request = request
        self._context = context
        self._pushing: asyncio.Future[Any] | None = None

    async def _first(self) -> TokenChunk:
        with self._request.span.child("meet") as span:
            opened = await self._prefill.open_rendezvous(self._request.within(span))
        request = self._request.with_rendezvous(opened.rendezvous)
        self._pushing = asyncio.ensure_future(opened.push(request, self._context))
        # The engines transfer the KV among themselves: nothing is to be released here.
        self._rest = self._decode(request, self._context, Handoff.not_ours())
        try:
            first = await _first_chunk(self._rest, self._pushing)
        except KV_NOT_ARRIVED as error:
            error.blame(opened.sender)
            raise
        if first is None:
            raise StopAsyncIteration
        return first

    async def _finish(self) -> None:
        if self._pushing is not None:
            await _end(self._pushing)


async def _first_chunk(
    chunks: AsyncGenerator[TokenChunk, None], pushing: asyncio.Future[Any]
) -> TokenChunk | None:
    """Decode's first chunk; None when decode ends without one. Raises the error of a push that fails before it."""
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
