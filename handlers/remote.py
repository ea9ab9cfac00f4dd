"""The phases that run on a worker of the other role."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Protocol

from trtllm_disagg.errors import (
    DisaggError,
    NoInstanceError,
    PeerUnavailableError,
    QueueUnusableError,
    RequestCancelledError,
)
from trtllm_disagg.handlers.cancellation import in_background
from trtllm_disagg.handlers.recall import NoNotices, Notices
from trtllm_disagg.tracing.spans import Span
from trtllm_disagg.types import (
    GenerateRequest,
    Handoff,
    PhaseRequest,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.bodies import decode_chunk
from trtllm_disagg.wire.handoff_formats import result_of
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

log = logging.getLogger(__name__)


class StageClient(Protocol):
    """The way to the workers of the other role."""

    async def pick(self, request: GenerateRequest) -> StageInstance:
        """One that this request may be sent to: none of `request.avoid`. Raises NoInstanceError when there
        is none.
        """
        ...

    def instance_ids(self) -> Collection[int]:
        """Those that are there now."""
        ...

    def check(self, request: GenerateRequest) -> None:
        """Raise InvalidRequestError when it wishes for an instance that never was."""
        ...


class StageInstance(Protocol):
    """One of them."""

    @property
    def instance_id(self) -> int: ...

    async def describe(self) -> dict[str, Any]:
        """What it says of itself (`pairing.describe_worker`). Raises a DisaggError."""
        ...

    def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Its chunks, with the same request id, metadata and trace; a stopped context stops it too, and then
        the iteration just ends. Without a context no client waits for the answer. Raises a DisaggError with this
        instance as `peer`, whatever became of it.
        """
        ...

    async def tell(self, notice: dict[str, Any]) -> None:
        """A request that has no answer (`PhaseRequest.is_notice`): it is no load there, and says nothing of how well
        the instance is. Raises a DisaggError.
        """
        ...


class NoStage:
    """The stage client of a worker that calls no other."""

    async def pick(self, request: GenerateRequest) -> StageInstance:
        raise AssertionError("this worker has no second stage")

    def instance_ids(self) -> Collection[int]:
        return ()

    def check(self, request: GenerateRequest) -> None:
        """No instance is there to wish for."""


#: As an instance, the prefill queue: to be blamed, and avoided, for what no worker has done.
QUEUE_ID = 0

PREFILL, DECODE = PhaseRequest("prefill"), PhaseRequest("decode")


class RemotePrefill:
    def __init__(
        self,
        client: StageClient,
        drain: Callable[[GenerateRequest], None],
        protocol: HandoffProtocol = DYNAMO,
        notices: Notices | NoNotices | None = None,
    ) -> None:
        """`drain` lets a handoff's KV go when no decode was started: only a decode can tell its holder. `notices` None:
        it goes through the queue, which knows what became of its answers.
        """
        self._client = client
        self._drain = drain
        self._protocol = protocol
        self._notices = notices or NoNotices()

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        with request.span.child("remote_prefill") as span:
            return await self._run(request.within(span), context)

    async def _run(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        instance = await selected(self._client, request)
        if instance.instance_id != QUEUE_ID:  # the worker that takes it from there says so itself
            request.trace.facts["prefill_instance"] = f"{instance.instance_id:x}"
        asked = self._notices.prefill(instance)
        handoffs: list[Handoff] = []
        with _released_on_error(handoffs):
            with self._notices.recalled_without(handoffs, instance, asked):
                await self._receive(handoffs, instance, asked, request, context)
            if context.is_stopped():
                raise RequestCancelledError("the client left during remote prefill")
            if len(handoffs) != 1:
                raise _fault(instance, f"the prefill worker sent {len(handoffs)} answers instead of one")
        return handoffs[0]

    async def _receive(
        self,
        handoffs: list[Handoff],
        instance: StageInstance,
        asked: PhaseRequest,
        request: GenerateRequest,
        context: RequestContext,
    ) -> None:
        """Adds each answer to `handoffs` as it comes: whatever ends the call, its caller has those to let go."""
        taken = partial(self._notices.taken, instance, asked)
        dispatch = dispatched(instance, request)
        raw_request = self._protocol.encode(request.within(dispatch), asked)
        async with aclosing(instance.call(raw_request, context)) as answers:
            with dispatch:
                async for raw in answers:
                    handoffs.append(self._handoff(request, decode_chunk(raw), taken))

    def _handoff(self, request: GenerateRequest, chunk: TokenChunk, taken: Callable[[], None]) -> Handoff:
        result = result_of(chunk)
        if result is None:
            if chunk.finish_reason is None:
                raise PeerUnavailableError("the prefill worker's answer is neither whole nor a handoff")
            return Handoff(chunk, None)
        if len(chunk.token_ids) != 1:
            raise PeerUnavailableError(
                f"the prefill worker sent {len(chunk.token_ids)} tokens instead of one"
            )
        handoff = Handoff(chunk.without_end(), result, _ended=taken, of_prompt=chunk.of_prompt)
        with_kv = request.with_handoff(handoff)
        handoff.on_release(lambda: self._drain(with_kv))
        return handoff


@contextmanager
def _released_on_error(handoffs: list[Handoff]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for handoff in handoffs:
            handoff.release()
        raise


class RemoteDecode:
    def __init__(self, client: StageClient, protocol: HandoffProtocol = DYNAMO) -> None:
        self._client = client
        self._protocol = protocol

    async def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        chunk: TokenChunk | None = None
        with request.span.child("remote_decode") as span:
            request = request.within(span)
            instance = await selected(self._client, request)
            request.trace.facts["decode_instance"] = f"{instance.instance_id:x}"
            handoff.is_asked_for = True
            dispatch = dispatched(instance, request)
            raw_request = self._protocol.encode(request.within(dispatch), DECODE)
            async with aclosing(instance.call(raw_request, context)) as answers:
                with dispatch:
                    first = await anext(answers, None)
                if first is not None:
                    # It answers, so it has the KV.
                    handoff.taken()
                    with span.child("relay"):
                        chunk = decode_chunk(first)
                        yield chunk
                        async for raw in answers:
                            chunk = decode_chunk(raw)
                            yield chunk
        has_ended = chunk is not None and chunk.finish_reason is not None
        if not has_ended and not context.is_stopped():
            raise _fault(instance, "the decode worker's answer stops without an end")


async def selected(client: StageClient, request: GenerateRequest) -> StageInstance:
    with request.span.child("select") as span:
        instance = await client.pick(request.within(span))
        span.note({"instance": f"{instance.instance_id:x}"})
        return instance


def dispatched(instance: StageInstance, request: GenerateRequest) -> Span:
    """From the call of an instance to its first answer. What that instance records is below it."""
    return request.span.child("dispatch", {"instance": f"{instance.instance_id:x}"})


def _fault(instance: StageInstance, what: str) -> PeerUnavailableError:
    error = PeerUnavailableError(what)
    error.peer = instance.instance_id
    return error


class RemoteDrain:
    """Has a decode worker fetch and drop the KV of another prefill worker that no decode has begun to fetch, as
    `LocalDecode.drain` does where there is an engine for that.
    """

    def __init__(self, client: StageClient, protocol: HandoffProtocol = DYNAMO) -> None:
        self._client = client
        self._protocol = protocol

    def __call__(self, request: GenerateRequest) -> None:
        in_background(self._fetch(request))

    async def _fetch(self, request: GenerateRequest) -> None:
        with request.span.child("drain") as span:
            await self._drain(request.within(span))

    async def _drain(self, request: GenerateRequest) -> None:
        one_token = self._protocol.encode(request, DECODE) | {"stop_conditions": {"max_tokens": 1}}
        try:
            instance = await self._client.pick(request)
            async with aclosing(instance.call(one_token, None)) as answers:
                async for _ in answers:
                    pass
        except DisaggError as error:
            # Best effort: the lease ends by itself.
            log.info("an unused handoff waits for the end of its lease: %s", error)


def queued(
    through: PrefillPhase,
    direct: PrefillPhase,
    passes_by: Callable[[GenerateRequest], bool] = lambda request: False,
) -> PrefillPhase:
    """A prefill through the queue. `direct` runs a request that is too large for it, that it has lost with all that it
    had, or that
    `passes_by`, because the worker with room may not be the one that it asks for.
    """

    async def prefill(request: GenerateRequest, context: RequestContext) -> Handoff:
        if passes_by(request):
            return await direct(request, context)
        try:
            return await through(request, context)
        except QueueUnusableError as error:
            if context.is_stopped():
                raise
            unusable = error
        log.warning("request %s: direct: %s", context.id(), unusable)
        request.trace.fell_back("direct", unusable)
        # The worker that had it does not answer any more.
        request.trace.facts.pop("prefill_instance", None)
        try:
            return await direct(request, context)
        except NoInstanceError:
            raise unusable from None  # says more than that no other instance is there

    return prefill
