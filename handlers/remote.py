"""Runs a prefill, a decode, a drain or the whole answer on a peer."""

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
    RequestCancelledError,
)
from trtllm_disagg.handlers.drain import in_background
from trtllm_disagg.handlers.peers import DECODE, Call, Peers, dispatch_span, select_instance
from trtllm_disagg.handlers.recall import Notices
from trtllm_disagg.handlers.selection import NEXT
from trtllm_disagg.types import GenerateRequest, Handoff, PhaseRequest, RequestContext, TokenChunk
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
        """`peers`: prefill workers. `drain` frees an unused handoff's KV by a decode that only fetches it, unless
        `notices` makes the prefill worker take it back.
        """
        self._peers = peers
        self._drain = drain
        self._notices = notices
        self._protocol = protocol

    async def __call__(
        self, request: GenerateRequest, context: RequestContext | None, offered: int | None = None
    ) -> Handoff:
        """`offered`: the prefill worker with room for the request; None: select one."""
        with request.span.child("remote_prefill") as span:
            request = request.within(span)
            call = await select_instance(self._peers, request, "prefill_instance", offered)
            asked = self._notices.new_attempt(call.instance)
            handoffs: list[Handoff] = []
            with call:
                try:
                    await self._receive(handoffs, call, asked, request, context)
                    if context is not None and context.is_stopped():
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
        context: RequestContext | None,
    ) -> None:
        """Add each answer to `handoffs` as it comes: the caller releases them however this ends."""
        with dispatch_span(call, request) as dispatch:
            body = self._protocol.encode(request.within(dispatch), asked)
            async with aclosing(call.answers(body, context)) as answers:
                async for answer in answers:
                    handoffs.append(self._handoff(request, context, decode_chunk(answer), call, asked))

    def _handoff(
        self,
        request: GenerateRequest,
        context: RequestContext | None,
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
            on_end=partial(self._notices.fetched, call.instance, asked),
            of_prompt=chunk.of_prompt,
        )


class RemoteDecode:
    def __init__(self, peers: Peers, protocol: HandoffProtocol = DYNAMO) -> None:
        self._peers = peers
        self._protocol = protocol

    def require_instance(self, request: GenerateRequest) -> None:
        """Raises NoInstanceError if no decode worker can take the handoff: an engine that cannot release it would keep
        the KV until its lease ends. One token needs no decode.
        """
        if request.stop.max_tokens != 1 and not set(self._peers.instance_ids()) - request.avoid:
            raise NoInstanceError("no decode worker in discovery can take this request")

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
                        # Decode has the KV once it answers.
                        handoff.decode_has_it()
                        with span.child("relay"):
                            yield decode_chunk(first)
                            async for answer in answers:
                                yield decode_chunk(answer)


class RemoteAnswer:
    """Runs the whole request on a peer, as first stage of `strategy`."""

    def __init__(self, peers: Peers, strategy: str, full: int | None = None) -> None:
        """`full`: this worker, if it relays because its batch is full."""
        self._peers = peers
        self._asked = PhaseRequest("whole", strategy, full=full)

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        if request.phase_request is not None:
            # Or two workers with dead engines would relay it back and forth.
            raise NoInstanceError("this request was relayed already")
        with request.span.child("other_stage") as span:
            request = request.within(span)
            call = await select_instance(self._peers, request, "first_stage")
            dispatch = dispatch_span(call, request)
            # Pins are for this worker's call, not for the peer's.
            annotations = [each for each in request.annotations if not each.startswith(NEXT)]
            body = encode_request(request.within(dispatch), self._asked, annotations=annotations)
            with call, dispatch:
                async with aclosing(call.answers(body, context)) as answers:
                    async for answer in answers:
                        yield decode_chunk(answer)


class RemoteDrain:
    """On a prefill worker: makes a decode worker fetch and drop unused KV. (A decode worker does so itself:
    `LocalDecode.drain`.)
    """

    def __init__(self, peers: Peers, protocol: HandoffProtocol = DYNAMO) -> None:
        self._peers = peers
        self._protocol = protocol

    def __call__(self, request: GenerateRequest) -> None:
        """`request`: from `only_fetching`."""
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
                # Best effort: the lease ends anyway.
                log.info("an unused handoff waits for the end of its lease: %s", error)
