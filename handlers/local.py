"""The phases on this worker's own engine: prefill, decode, and both together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

import msgspec

from trtllm_disagg.engine.capabilities import RELEASES_HANDOFFS
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.engine_errors import EngineErrors
from trtllm_disagg.engine.llm_api import RequestOutput
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    HandoffRefusedError,
    KvTransferError,
    OverloadedError,
    RequestCancelledError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.cancellation import AbortGuard, when_stopped
from trtllm_disagg.handlers.drain import in_background
from trtllm_disagg.handlers.outputs import FewTicksLater, Notify, OutputCursor, newest_states
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.trace import record_decode, record_prefill
from trtllm_disagg.types import GenerateRequest, Handoff, PrefillResult, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import encode_disaggregated_params, names_a_sender
from trtllm_disagg.wire.images import as_prefilled, encode_prompt

log = logging.getLogger(__name__)


class LocalPrefill:
    """Runs context_only: the prompt's KV and the first token."""

    def __init__(
        self,
        engine: Engine,
        drain: Callable[[GenerateRequest], None] = lambda request: None,
        *,
        seconds: float | None = None,
        sees_callers_max_tokens: bool = True,
    ) -> None:
        """`drain` lets a decode worker fetch an unused handoff that the engine cannot release. A prefill that takes
        longer than `seconds` is aborted with StageTimeoutError. `sees_callers_max_tokens`: false behind Dynamo's
        router, which always calls prefill with max_tokens 1.
        """
        self._engine = engine
        self._drain = None if RELEASES_HANDOFFS in engine.capabilities else drain
        self._seconds = seconds
        self._sees_callers_max_tokens = sees_callers_max_tokens

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        with request.span.child("prefill") as span, self._engine.prefilling(request.num_prompt):
            request = request.within(span)
            if self._seconds is None:
                return await self._run(request, context)
            try:
                async with asyncio.timeout(self._seconds):
                    return await self._run(request, context)
            except TimeoutError:
                raise StageTimeoutError(f"the prefill did not finish within {self._seconds:g} s") from None

    async def _run(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        if self._first_token_is_the_answer(request):
            return await self._whole(request, context)
        result = await unless_left(context, request, self._engine.started_prefill(request))
        guard = self._guard(request, context, result)
        guard.then = partial(self._release_unanswered, request, result, guard)
        try:
            await finished(self._engine, result, guard, context)
        except BaseException:
            # It finished before the cancellation arrived: its KV is held and must be released.
            if result.finished:
                guard.then()
            raise
        return self._handoff(request, context, result)

    def _guard(self, request: GenerateRequest, context: RequestContext, result: RequestOutput) -> AbortGuard:
        deferred = self._engine.needs_uncached_prompt(request)
        return AbortGuard(self._engine, result, context, deferred=deferred)

    def _first_token_is_the_answer(self, request: GenerateRequest) -> bool:
        """No decode follows, so no KV has to be held."""
        is_the_only_one = self._sees_callers_max_tokens and request.stop.max_tokens == 1
        return is_the_only_one and not request.decode_follows

    async def _whole(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        result = await unless_left(context, request, self._engine.started_agg(request, streaming=False))
        await finished(self._engine, result, self._guard(request, context, result), context)
        chunk = self._first(request, result)
        if chunk.finish_reason in _ENDS_OF_EVERY_PREFILL:
            chunk = msgspec.structs.replace(chunk, finish_reason="length")
        return Handoff(chunk, None)

    def _first(self, request: GenerateRequest, result: RequestOutput) -> TokenChunk:
        error = EngineError("the engine ended the prefill without a token")
        return only_chunk(self._engine, request, result, error)

    def _handoff(self, request: GenerateRequest, context: RequestContext, result: RequestOutput) -> Handoff:
        try:
            chunk = self._first(request, result)
            if chunk.finish_reason not in _ENDS_OF_EVERY_PREFILL:
                if self._drain is None:
                    self._engine.abort(result)
                return Handoff(chunk, None)
            passed = self._result(request, chunk, result)
        except BaseException:
            self._engine.abort(result)
            raise
        return Handoff(
            chunk.without_end(),
            passed,
            on_release=lambda handoff: self._release(request, context, result, handoff),
            on_end=self._engine.handoffs.hold(),
            of_prompt=chunk.of_prompt,
        )

    def _result(self, request: GenerateRequest, chunk: TokenChunk, result: RequestOutput) -> PrefillResult:
        params = result.outputs[0].disaggregated_params
        encoded = encode_disaggregated_params(params) if params is not None else {}
        if not names_a_sender(encoded):
            raise EngineError("the engine finished the prefill without disaggregated_params")
        if not encoded.get("first_gen_tokens"):  # only TensorRT-LLM's C++ code sets it
            encoded["first_gen_tokens"] = list(chunk.token_ids)
        # TensorRT-LLM returns its id under this name only, but its decode may read the other one.
        if (context_id := encoded.get("ctx_request_id")) is not None:
            encoded.setdefault("disagg_request_id", context_id)
        if request.images is not None:
            encoded |= encode_prompt(result.prompt_token_ids, result.prompt)
        usage = chunk.completion_usage
        return PrefillResult(encoded, usage.prompt_tokens_details if usage is not None else None)

    def _release(
        self, request: GenerateRequest, context: RequestContext, result: RequestOutput, handoff: Handoff
    ) -> None:
        if self._drain is None:
            self._engine.abort(result)
        elif not handoff.is_fetched_for_a_client_that_left(context):
            fetching = request.only_fetching(handoff)
            if self._engine.handoffs.may_be_drained(fetching):
                self._drain(fetching)

    def _release_unanswered(self, request: GenerateRequest, result: RequestOutput, guard: AbortGuard) -> None:
        """Release the KV of a finished prefill that never answered its caller."""
        if self._drain is None:
            guard.abort()
            return
        with contextlib.suppress(DisaggError):  # the prefill left no KV
            passed = self._result(request, self._first(request, result), result)
            self._drain(request.only_fetching(Handoff(TokenChunk([]), passed)))


async def unless_left(
    context: RequestContext, request: GenerateRequest, started: Awaitable[RequestOutput]
) -> RequestOutput:
    """Await the start of a request. Raises RequestCancelledError if the client leaves while its images load."""
    if request.images is None:
        return await started
    try:
        async with asyncio.timeout(None) as loading:
            with when_stopped(context, partial(loading.reschedule, 0.0)):
                return await started
    except TimeoutError:
        raise RequestCancelledError("the client left while its images were loaded") from None


async def finished(engine: Engine, result: RequestOutput, guard: AbortGuard, context: RequestContext) -> None:
    """Wait for a prefill. If the client leaves, `guard` aborts it. Raises RequestCancelledError then."""
    with guard:
        await engine.finished(result, guard.failed)
    if context.is_stopped():
        raise RequestCancelledError("the client left during prefill")


def only_chunk(
    engine: Engine, request: GenerateRequest, result: RequestOutput, otherwise: DisaggError
) -> TokenChunk:
    """The only chunk of a finished prefill. Raises `otherwise` if there is none."""
    chunks = OutputCursor(request.num_prompt).advance(result)
    if not chunks or chunks[0].finish_reason == "cancelled":
        raise otherwise
    record_prefill(engine, request, result)
    return chunks[0]


#: context_only ends with one of these after its only token; they do not end the answer.
_ENDS_OF_EVERY_PREFILL = ("length", "not_finished", None)


class LocalDecode:
    """Runs generation_only: fetches the KV and generates from the first token on."""

    def __init__(
        self,
        engine: Engine,
        *,
        repeats_first_token: bool,
        notify: Notify | None = None,
        first_token_seconds: float | None = None,
        prefill_workers: Peers | None = None,
        max_batch_size: float = math.inf,
    ) -> None:
        """`repeats_first_token`: the engine's answer starts with prefill's token, and the client gets it from here.
        `notify`: as for `newest_states`. A decode without a token for `first_token_seconds`, KV transfer included, ends
        with StageTimeoutError. `prefill_workers`: blamed for missing KV. Requests beyond `max_batch_size` wait in the
        engine's queue.
        """
        self._engine = engine
        self._skip = 0 if repeats_first_token else 1
        self._notify = notify or FewTicksLater()
        self._first_token_seconds = first_token_seconds
        self._prefill_workers = prefill_workers
        self._max_batch_size = max_batch_size

    async def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """`handoff` None: its sender releases it."""
        handoff = handoff or Handoff.not_ours()
        engine, began = self._engine, time.monotonic()
        has_begun, waits = False, engine.answering.count >= self._max_batch_size
        with request.span.child("decode") as span:
            request = as_prefilled(request.within(span), takes_images=engine.images is not None)
            result = engine.start_decode(request)
            handoff.decode_has_it()
            cursor = self._cursor(request)
            # With a rendezvous the KV may never come, so an abort must not wait for an output.
            guard = AbortGuard(engine, result, context, deferred=request.rendezvous is None)
            try:
                with engine.answering, guard:
                    states = newest_states(result, guard.may_abort, engine.cancel_at_death, self._notify)
                    async with EngineErrors(engine, guard.failed), aclosing(states):
                        first = await self._first_chunks(states, cursor)
                        has_begun = True
                        self._kv_arrived(handoff)
                        for chunk in first:
                            if chunk.finish_reason is not None:
                                record_decode(engine, request, result)
                            yield chunk
                        async for state in states:
                            for chunk in cursor.advance(state):
                                if chunk.finish_reason is not None:
                                    record_decode(engine, request, result)
                                yield chunk
            except (KvTransferError, HandoffRefusedError) as error:
                if not has_begun and not context.is_stopped():  # else its sender may have released it
                    # The lease began before this decode: half of it is enough.
                    lasted = time.monotonic() - began > engine.handoffs.lease_seconds / 2
                    self._kv_was_lost(handoff, request, error, waited=waits and lasted)
                raise

    def _cursor(self, request: GenerateRequest) -> OutputCursor:
        prefill = request.prefill_result
        details = prefill.prompt_tokens_details if prefill is not None else None
        return OutputCursor(
            request.num_prompt,
            skip=self._skip,
            cached_tokens=details.cached_tokens if details is not None else None,
            was_fetched=True,
            max_new_tokens=self._engine.facts.room(request),
        )

    async def _first_chunks(
        self, states: AsyncGenerator[RequestOutput, None], cursor: OutputCursor
    ) -> Sequence[TokenChunk]:
        try:
            async with asyncio.timeout(self._first_token_seconds):
                async for state in states:
                    if chunks := cursor.advance(state):
                        return chunks
        except TimeoutError:
            raise StageTimeoutError(
                f"decode generated no token within {self._first_token_seconds:g} s"
            ) from None
        return ()

    def _kv_arrived(self, handoff: Handoff) -> None:
        if self._prefill_workers is not None and handoff.sender is not None:
            self._prefill_workers.kv_arrived(handoff.sender)

    def _kv_was_lost(
        self, handoff: Handoff, request: GenerateRequest, error: DisaggError, *, waited: bool
    ) -> None:
        """Blame the sender. Raises OverloadedError instead if the lease ended while the request waited here."""
        if waited and isinstance(error, KvTransferError):
            raise OverloadedError(f"the batch had no room before the lease ended: {error}") from error
        if self._prefill_workers is not None and handoff.sender is not None:
            self._prefill_workers.kv_was_lost(handoff.sender, request, error)

    def drain(self, request: GenerateRequest) -> None:
        """Fetch and drop an unused handoff to free its sender's blocks: a decode of one token, in the background.
        Unlike a release message, it works on every engine. `request`: from `only_fetching`.
        """
        if self._engine.handoffs.may_be_drained(request):
            in_background(self._drain(request), "drain of an unused handoff")

    async def _drain(self, request: GenerateRequest) -> None:
        try:
            await fetch(self._engine, request)
        except DisaggError as error:
            # Best effort: the lease ends anyway.
            log.info("an unused handoff waits for the end of its lease: %s", error)


async def fetch(engine: Engine, request: GenerateRequest) -> None:
    """Fetch a handoff's KV and drop the token. Raises a DisaggError. `request`: from `only_fetching`."""
    with request.span.child("drain"):
        request = as_prefilled(request, takes_images=engine.images is not None)
        await engine.finished(engine.start_decode(request))


class LocalAgg:
    """Runs context_and_generation: the whole answer on this worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._notify = FewTicksLater()

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        engine = self._engine
        with request.span.child("generate") as span:
            request = engine.uncached(request.within(span))
            result = await unless_left(context, request, engine.started_agg(request))
            cursor = OutputCursor(request.num_prompt)
            deferred = engine.needs_uncached_prompt(request)
            with engine.answering, AbortGuard(engine, result, context, deferred=deferred) as guard:
                states = newest_states(result, guard.may_abort, engine.cancel_at_death, self._notify)
                async with EngineErrors(engine, guard.failed), aclosing(states):
                    async for state in states:
                        for chunk in cursor.advance(state):
                            if chunk.finish_reason is not None:
                                record_prefill(engine, request, result)
                            yield chunk
