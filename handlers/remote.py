"""What workers of the other role do for a request: a prefill, a decode, a drain, or the whole answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from trtllm_disagg.errors import (
    DisaggError,
    HandoffRefusedError,
    NoInstanceError,
    PeerUnavailableError,
    QueueUnusableError,
    RequestCancelledError,
)
from trtllm_disagg.handlers.cancellation import in_background
from trtllm_disagg.handlers.peers import DECODE, Call, Peers, dispatch_span, select_instance
from trtllm_disagg.handlers.recall import Notices
from trtllm_disagg.handlers.select import NEXT
from trtllm_disagg.types import (
    Fallback,
    GenerateRequest,
    Handoff,
    PhaseRequest,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.bodies import decode_chunk, encode_request, require_readable
from trtllm_disagg.wire.handoff_formats import result_of
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

log = logging.getLogger(__name__)


class RemotePrefill:
    def __init__(
        self,
        peers: Peers,
        drain: Callable[[GenerateRequest], None],
        notices: Notices,
        protocol: HandoffProtocol = DYNAMO,
    ) -> None:
        """`peers`: prefill workers, or the prefill queue. `drain` frees the KV of a handoff that no decode was started
        for, by a decode that only fetches it, unless `notices` has the prefill worker take it back.
        """
        self._peers = peers
        self._drain = drain
        self._notices = notices
        self._protocol = protocol

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        with request.span.child("remote_prefill") as span:
            request = request.within(span)
            call = await select_instance(self._peers, request, "prefill_instance")
            asked = self._notices.new_attempt(call.instance)
            handoffs: list[Handoff] = []
            with call:
                try:
                    await self._receive(handoffs, call, asked, request, context)
                    if context.is_stopped():
                        raise RequestCancelledError("the client left during remote prefill")
                    if len(handoffs) != 1:
                        raise PeerUnavailableError(
                            f"the prefill worker sent {len(handoffs)} answers instead of one"
                        )
                except BaseException as error:
                    if not handoffs:
                        self._notices.lost(call.instance, asked, error)
                    for handoff in handoffs:
                        handoff.release()
                    raise
            handoffs[0].sender = call.instance_id
            return handoffs[0]

    async def _receive(
        self,
        handoffs: list[Handoff],
        call: Call,
        asked: PhaseRequest,
        request: GenerateRequest,
        context: RequestContext,
    ) -> None:
        """Add each answer to `handoffs` as it comes, so that the caller can release them however this ends."""
        with dispatch_span(call, request) as dispatch:
            body = self._protocol.encode(request.within(dispatch), asked)
            async with aclosing(call.answers(body, context)) as answers:
                async for answer in answers:
                    handoffs.append(self._handoff(request, context, decode_chunk(answer), call, asked))

    def _handoff(
        self,
        request: GenerateRequest,
        context: RequestContext,
        chunk: TokenChunk,
        call: Call,
        asked: PhaseRequest,
    ) -> Handoff:
        try:
            result = result_of(chunk)
            if result is not None:
                require_readable(result)
        except HandoffRefusedError as error:
            raise PeerUnavailableError(f"the prefill worker sent an unreadable handoff: {error}") from None
        if result is None:
            if chunk.finish_reason is None:
                raise PeerUnavailableError("the prefill worker's answer has no finish reason and no handoff")
            return Handoff(chunk, None)
        if len(chunk.token_ids) != 1:
            raise PeerUnavailableError(
                f"the prefill worker sent {len(chunk.token_ids)} tokens instead of one"
            )

        def release(handoff: Handoff) -> None:
            if not handoff.is_fetched_for_a_client_that_left(context):
                drain = partial(self._drain, request.only_fetching(handoff))
                self._notices.free(call.instance, asked, drain)

        return Handoff(
            chunk.without_end(),
            result,
            on_release=release,
            on_end=partial(self._notices.taken, call.instance, asked),
            of_prompt=chunk.of_prompt,
        )


class RemoteDecode:
    def __init__(self, peers: Peers, protocol: HandoffProtocol = DYNAMO) -> None:
        self._peers = peers
        self._protocol = protocol

    def require_instance(self, request: GenerateRequest) -> None:
        """Raises NoInstanceError when no decode worker can take what a prefill would make: an engine that cannot
        release a handoff would keep that KV until its lease ends. One token needs no decode.
        """
        if request.stop.max_tokens != 1 and not set(self._peers.instance_ids()) - request.avoid:
            raise NoInstanceError("no decode worker is in discovery that has not failed this request")

    async def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        with request.span.child("remote_decode") as span:
            request = request.within(span)
            call = await select_instance(self._peers, request, "decode_instance")
            handoff.receiver, handoff.is_being_fetched = call.instance_id, True
            dispatch = dispatch_span(call, request)
            body = self._protocol.encode(request.within(dispatch), DECODE)
            with call:
                async with aclosing(call.answers(body, context)) as answers:
                    try:
                        with dispatch:
                            first = await anext(answers, None)
                    except DisaggError as error:
                        handoff.is_being_fetched = not error.was_raised_there
                        raise
                    if first is not None:
                        # An answer means that decode has the KV.
                        handoff.decode_has_it()
                        with span.child("relay"):
                            yield decode_chunk(first)
                            async for answer in answers:
                                yield decode_chunk(answer)


class RemoteAnswer:
    """The whole answer by a worker of the other role, the first stage of `strategy`."""

    def __init__(self, peers: Peers, strategy: str, full: int | None = None) -> None:
        """`full`: this worker, where it calls the other one because its batch is full."""
        self._peers = peers
        self._asked = PhaseRequest("whole", strategy, full=full)

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        if request.phase_request is not None:
            # Two workers with lost engines would relay it back and forth.
            raise NoInstanceError("this request was relayed already")
        with request.span.child("other_stage") as span:
            request = request.within(span)
            call = await select_instance(self._peers, request, "first_stage")
            dispatch = dispatch_span(call, request)
            # Pins are for this worker's call, not for the call that the other worker makes.
            annotations = [each for each in request.annotations if not each.startswith(NEXT)]
            body = encode_request(request.within(dispatch), self._asked, annotations=annotations)
            with call, dispatch:
                async with aclosing(call.answers(body, context)) as answers:
                    async for answer in answers:
                        yield decode_chunk(answer)


class RemoteDrain:
    """On a prefill worker: has a decode worker fetch and drop KV that no decode has begun to fetch. (A decode worker
    does that itself: `LocalDecode.drain`.)
    """

    def __init__(self, peers: Peers, protocol: HandoffProtocol = DYNAMO) -> None:
        self._peers = peers
        self._protocol = protocol

    def __call__(self, request: GenerateRequest) -> None:
        """`request`: as `only_fetching` makes it."""
        in_background(self._fetch(request), "drain of an unused handoff")

    async def _fetch(self, request: GenerateRequest) -> None:
        with request.span.child("drain") as span:
            request = request.within(span)
            try:
                with await self._peers.pick(request) as call:
                    body = self._protocol.encode(request, DECODE)
                    async with aclosing(call.answers(body, None)) as answers:
                        async for _ in answers:
                            pass
            except DisaggError as error:
                # Best effort: the lease ends by itself.
                log.info("an unused handoff waits for the end of its lease: %s", error)


class QueuedPrefill:
    """A prefill through the queue; `direct` for a request that the queue cannot take or has lost, and for one that
    `bypasses_queue` because it pins prefill workers, which the queue cannot choose.
    """

    def __init__(
        self,
        through_queue: PrefillPhase,
        direct: PrefillPhase,
        bypasses_queue: Callable[[GenerateRequest], bool] = lambda request: False,
    ) -> None:
        self._through_queue = through_queue
        self._direct = direct
        self._bypasses_queue = bypasses_queue

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        if self._bypasses_queue(request):
            return await self._direct(request, context)
        try:
            return await self._through_queue(request, context)
        except QueueUnusableError as error:
            if context.is_stopped():
                raise
            unusable = error
        log.warning("request %s: the prefill queue failed (%s); trying direct", context.id(), unusable)
        request.trace.fell_back(Fallback.DIRECT, unusable)
        # The worker that had claimed the item will not answer.
        request.trace.facts.pop("prefill_instance", None)
        try:
            return await self._direct(request, context)
        except NoInstanceError:
            raise unusable from None  # the better reason
