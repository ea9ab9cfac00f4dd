"""The phases that run on a worker of the other role."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Protocol

from trtllm_disagg.errors import (
    DisaggError,
    HandoffRefusedError,
    NoInstanceError,
    PeerUnavailableError,
    QueueUnusableError,
    RequestCancelledError,
)
from trtllm_disagg.handlers.cancellation import in_background
from trtllm_disagg.handlers.recall import NoNotices, Notices
from trtllm_disagg.tracing.spans import Span
from trtllm_disagg.types import (
    Fallback,
    GenerateRequest,
    Handoff,
    PhaseRequest,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.bodies import decode_chunk, limited_to_one_token, require_readable
from trtllm_disagg.wire.handoff_formats import result_of
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

log = logging.getLogger(__name__)


class StageClient(Protocol):
    """The client of the workers of the other role."""

    async def pick(self, request: GenerateRequest) -> StageInstance:
        """An instance for this request: none of `request.avoid`, and one of `request.skipped` only without another one.
        Raises NoInstanceError when there is none.
        """
        ...

    def instance_ids(self) -> Collection[int]:
        """The instances in discovery now."""
        ...

    def check(self, request: GenerateRequest) -> None:
        """Raise InvalidRequestError when the request pins an instance that never existed."""
        ...


class StageInstance(Protocol):
    """One worker of the other role."""

    @property
    def instance_id(self) -> int: ...

    async def describe(self) -> dict[str, Any]:
        """The worker's description of itself (`pairing.describe_worker`). Raises a DisaggError."""
        ...

    def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Call the worker, with the request id, metadata and trace of `context`, and yield its chunks. When the context
        is stopped, so is the call, and the chunks just end; None: no client waits for the answer. Raises a DisaggError
        with this instance as `peer`.
        """
        ...

    async def notify(self, notice: dict[str, Any]) -> None:
        """Send a request that has no answer (`PhaseRequest.is_notice`). It counts neither as load nor for the circuit
        breaker. Raises a DisaggError.
        """
        ...


class QueueStageClient(StageClient, Protocol):
    """The prefill queue's StageClient."""

    def require(self, workers: StageClient) -> None:
        """From now on a request gets NoInstanceError while none of `workers` is in discovery."""
        ...


class NoStage:
    """The StageClient of a worker that calls no other."""

    async def pick(self, request: GenerateRequest) -> StageInstance:
        raise AssertionError("this worker has no second stage")

    def instance_ids(self) -> Collection[int]:
        return ()

    def check(self, request: GenerateRequest) -> None:
        """Accept every request: a pin has no effect here."""


#: The instance id that stands for the prefill queue when a prefill failed before a worker took it.
QUEUE_ID = 0


def name_of(instance_id: int) -> str:
    """For logs and errors."""
    return "the prefill queue" if instance_id == QUEUE_ID else f"instance {instance_id:x}"


PREFILL, DECODE = PhaseRequest("prefill"), PhaseRequest("decode")


class RemotePrefill:
    def __init__(
        self,
        client: StageClient,
        drain: Callable[[GenerateRequest], None],
        protocol: HandoffProtocol = DYNAMO,
        notices: Notices | NoNotices | None = None,
    ) -> None:
        """`drain` frees the KV of a handoff that no decode was started for, by a decode that only fetches it, unless
        `notices` has the prefill worker take it back. `notices` None: `client` is the prefill queue of decode workers.
        """
        self._client = client
        self._drain = drain
        self._protocol = protocol
        self._notices = notices or NoNotices()

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        with request.span.child("remote_prefill") as span:
            return await self._run(request.within(span), context)

    async def _run(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        instance = await select_instance(self._client, request)
        if instance.instance_id != QUEUE_ID:  # otherwise the worker's claim records its id
            request.trace.facts["prefill_instance"] = f"{instance.instance_id:x}"
        asked = self._notices.new_attempt(instance)
        handoffs: list[Handoff] = []
        with blaming(instance), _released_on_error(handoffs):
            with self._notices.recalled_if_lost(handoffs, instance, asked):
                await self._receive(handoffs, instance, asked, request, context)
            if context.is_stopped():
                raise RequestCancelledError("the client left during remote prefill")
            if len(handoffs) != 1:
                raise PeerUnavailableError(f"the prefill worker sent {len(handoffs)} answers instead of one")
        handoff = handoffs[0]
        handoff.sender = instance.instance_id
        return handoff

    async def _receive(
        self,
        handoffs: list[Handoff],
        instance: StageInstance,
        asked: PhaseRequest,
        request: GenerateRequest,
        context: RequestContext,
    ) -> None:
        """Add each answer to `handoffs` as it comes, so that the caller can release them however this ends."""
        on_taken = partial(self._notices.taken, instance, asked)
        take_back = partial(self._notices.take_back, instance, asked)
        dispatch = dispatch_span(instance, request)
        raw_request = self._protocol.encode(request.within(dispatch), asked)
        async with answers_of(instance, raw_request, context) as answers:
            with dispatch:
                async for raw in answers:
                    handoffs.append(self._handoff(request, context, decode_chunk(raw), on_taken, take_back))

    def _handoff(
        self,
        request: GenerateRequest,
        context: RequestContext,
        chunk: TokenChunk,
        on_taken: Callable[[], None],
        take_back: Callable[[Callable[[], None]], None],
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
        return Handoff(
            chunk.without_end(),
            result,
            on_release=lambda handoff: self._release(request, context, handoff, take_back),
            on_end=on_taken,
            of_prompt=chunk.of_prompt,
        )

    def _release(
        self,
        request: GenerateRequest,
        context: RequestContext,
        handoff: Handoff,
        take_back: Callable[[Callable[[], None]], None],
    ) -> None:
        if not handoff.is_fetched_for_a_client_that_left(context):
            take_back(partial(self._drain, request.with_handoff(handoff)))


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
        with request.span.child("remote_decode") as span:
            request = request.within(span)
            instance = await select_instance(self._client, request)
            request.trace.facts["decode_instance"] = f"{instance.instance_id:x}"
            handoff.receiver = instance.instance_id
            dispatch = dispatch_span(instance, request)
            raw_request = self._protocol.encode(request.within(dispatch), DECODE)
            with blaming(instance):
                async with answers_of(instance, raw_request, context) as answers:
                    with dispatch:
                        first = await anext(answers, None)
                    if first is not None:
                        # An answer means that decode has the KV.
                        handoff.decode_has_it()
                        with span.child("relay"):
                            yield decode_chunk(first)
                            async for raw in answers:
                                yield decode_chunk(raw)


async def select_instance(client: StageClient, request: GenerateRequest) -> StageInstance:
    with request.span.child("select") as span:
        instance = await client.pick(request.within(span))
        span.note({"instance": f"{instance.instance_id:x}"})
        return instance


def dispatch_span(instance: StageInstance, request: GenerateRequest) -> Span:
    """The span from the call of an instance to its first answer, parent of that worker's spans."""
    return request.span.child("dispatch", {"instance": f"{instance.instance_id:x}"})


@asynccontextmanager
async def answers_of(
    instance: StageInstance, request: dict[str, Any], context: RequestContext
) -> AsyncGenerator[AsyncGenerator[dict[str, Any], None], None]:
    """The answers of a call. A PeerUnavailableError of their reader is thrown into the call, too: for the circuit
    breaker, an answer that is of no use is a failure of the instance.
    """
    async with aclosing(instance.call(request, context)) as answers:
        try:
            yield answers
        except PeerUnavailableError as error:
            error.blame(instance.instance_id)
            await answers.athrow(error)
            raise  # it was the call's own: that has ended, and takes no error


@contextmanager
def blaming(instance: StageInstance) -> Iterator[None]:
    """The answer of `instance` is read inside: it is to blame for one that is of no use."""
    try:
        yield
    except PeerUnavailableError as error:
        error.blame(instance.instance_id)
        raise


def requiring_decode_worker(stage: StageClient, prefill: PrefillPhase) -> PrefillPhase:
    """`prefill`, which raises NoInstanceError before it begins when no decode worker can take what it makes: an engine
    that cannot release a handoff would keep that KV until its lease ends. One token needs no decode.
    """

    async def checked(request: GenerateRequest, context: RequestContext) -> Handoff:
        if request.stop.max_tokens != 1 and not set(stage.instance_ids()) - request.avoid:
            raise NoInstanceError("no decode worker is in discovery that has not failed this request")
        return await prefill(request, context)

    return checked


class RemoteDrain:
    """On a prefill worker: has a decode worker fetch and drop KV that no decode has begun to fetch. (A decode worker
    does that itself: `LocalDecode.drain`.)
    """

    def __init__(self, client: StageClient, protocol: HandoffProtocol = DYNAMO) -> None:
        self._client = client
        self._protocol = protocol

    def __call__(self, request: GenerateRequest) -> None:
        in_background(self._fetch(request), "drain of an unused handoff")

    async def _fetch(self, request: GenerateRequest) -> None:
        with request.span.child("drain") as span:
            request = request.within(span)
            one_token = limited_to_one_token(self._protocol.encode(request, DECODE))
            try:
                instance = await self._client.pick(request)
                async with aclosing(instance.call(one_token, None)) as answers:
                    async for _ in answers:
                        pass
            except DisaggError as error:
                # Best effort: the lease ends by itself.
                log.info("an unused handoff waits for the end of its lease: %s", error)


def queued(
    through_queue: PrefillPhase,
    direct: PrefillPhase,
    bypasses_queue: Callable[[GenerateRequest], bool] = lambda request: False,
) -> PrefillPhase:
    """A prefill through the queue. `direct` runs a request that the queue cannot take or has lost, and one that
    `bypasses_queue` because it pins prefill workers, which the queue cannot choose.
    """

    async def prefill(request: GenerateRequest, context: RequestContext) -> Handoff:
        if bypasses_queue(request):
            return await direct(request, context)
        try:
            return await through_queue(request, context)
        except QueueUnusableError as error:
            if context.is_stopped():
                raise
            unusable = error
        log.warning("request %s: the prefill queue failed (%s); trying direct", context.id(), unusable)
        request.trace.fell_back(Fallback.DIRECT, unusable)
        # The worker that had claimed the item will not answer.
        request.trace.facts.pop("prefill_instance", None)
        try:
            return await direct(request, context)
        except NoInstanceError:
            raise unusable from None  # the better reason

    return prefill
