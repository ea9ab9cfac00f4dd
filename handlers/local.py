"""The phases on this worker's own engine: prefill, decode, and both together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
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
    RequestCancelledError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.cancellation import AbortGuard, in_background
from trtllm_disagg.handlers.outputs import (
    ChoicesCursor,
    Notify,
    OutputCursor,
    at_once,
    newest_states,
    record_engine,
    spanned,
)
from trtllm_disagg.handlers.trace import record_cache_hit, record_transfer
from trtllm_disagg.streams import PerRequestStream
from trtllm_disagg.types import (
    DecodePhase,
    GenerateRequest,
    Handoff,
    PrefillPhase,
    PrefillResult,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.bodies import encode_disaggregated_params, names_a_sender

log = logging.getLogger(__name__)


class LocalPrefill:
    """context_only: the prompt's KV, and the first token."""

    def __init__(
        self,
        engine: Engine,
        drain: Callable[[GenerateRequest], None] = lambda request: None,
        *,
        sees_callers_max_tokens: bool = True,
    ) -> None:
        """`drain` has a decode worker fetch an unused handoff, for an engine that cannot release one.
        `sees_callers_max_tokens` is false behind Dynamo's router, which calls prefill with max_tokens 1 in any case.
        """
        self._engine = engine
        self._drain = None if RELEASES_HANDOFFS in engine.capabilities else drain
        self._sees_callers_max_tokens = sees_callers_max_tokens

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        with request.span.child("prefill") as span:
            return await self._run(request.within(span), context)

    async def _run(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        if self._first_token_is_the_answer(request):
            return await self._whole(request, context)
        result = self._engine.start_prefill(request)
        guard = AbortGuard(self._engine, result, context)
        try:
            await finished(self._engine, result, guard)
            if context.is_stopped():
                raise RequestCancelledError("the client left during prefill")
        except BaseException:
            # It finished while the cancellation was on its way: its KV is held and must be released.
            if result.finished:
                self._release_unanswered(request, result, guard)
            raise
        return self._handoff(request, context, result)

    def _first_token_is_the_answer(self, request: GenerateRequest) -> bool:
        """No decode will follow, so no KV has to be held for one."""
        is_the_only_one = self._sees_callers_max_tokens and request.stop.max_tokens == 1
        return is_the_only_one and not request.decode_follows

    async def _whole(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        result = self._engine.start_agg(request, streaming=False)
        await finished(self._engine, result, AbortGuard(self._engine, result, context))
        if context.is_stopped():
            raise RequestCancelledError("the client left during prefill")
        chunk = self._first(request, result)
        if chunk.finish_reason in _ENDS_OF_EVERY_PREFILL:
            chunk = msgspec.structs.replace(chunk, finish_reason="length")
        return Handoff(chunk, None)

    def _first(self, request: GenerateRequest, result: RequestOutput) -> TokenChunk:
        chunks = OutputCursor(len(request.token_ids)).advance(result)
        if not chunks or chunks[0].finish_reason == "cancelled":
            raise EngineError("the engine ended the prefill without a token")
        record_cache_hit(request, result)
        record_engine(self._engine, request, result)
        return chunks[0]

    def _handoff(self, request: GenerateRequest, context: RequestContext, result: RequestOutput) -> Handoff:
        try:
            chunk = self._first(request, result)
            if chunk.finish_reason not in _ENDS_OF_EVERY_PREFILL:
                if self._drain is None:
                    self._engine.abort(result)
                return Handoff(chunk, None)
            passed = self._result(chunk, result)
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

    def _result(self, chunk: TokenChunk, result: RequestOutput) -> PrefillResult:
        params = result.outputs[0].disaggregated_params
        encoded = encode_disaggregated_params(params) if params is not None else {}
        if not names_a_sender(encoded):
            raise EngineError("the engine finished the prefill without disaggregated_params")
        # TensorRT-LLM returns its id only under this name, and its decode may read the other one.
        if (context_id := encoded.get("ctx_request_id")) is not None:
            encoded.setdefault("disagg_request_id", context_id)
        usage = chunk.completion_usage
        return PrefillResult(encoded, usage.prompt_tokens_details if usage is not None else None)

    def _release(
        self, request: GenerateRequest, context: RequestContext, result: RequestOutput, handoff: Handoff
    ) -> None:
        if self._drain is None:
            self._engine.abort(result)
        elif not handoff.is_fetched_for_a_client_that_left(context):
            self._drain(request.with_handoff(handoff))

    def _release_unanswered(self, request: GenerateRequest, result: RequestOutput, guard: AbortGuard) -> None:
        """Release the KV of a prefill that has finished without an answer to its caller."""
        if self._drain is None:
            guard.abort()
            return
        with contextlib.suppress(DisaggError):  # the prefill left no KV
            passed = self._result(self._first(request, result), result)
            self._drain(msgspec.structs.replace(request, prefill_result=passed))


async def finished(engine: Engine, result: RequestOutput, guard: AbortGuard) -> None:
    """Wait until the engine has finished a request; `guard` aborts it when its client leaves."""
    with guard:
        await engine.finished(result, guard.failed)


#: context_only ends with one of these after its one token; they say nothing about the end of the answer.
_ENDS_OF_EVERY_PREFILL = ("length", "not_finished", None)


class LocalDecode:
    """generation_only: fetches the KV and generates from the first token on."""

    def __init__(self, engine: Engine, *, repeats_first_token: bool, notify: Notify = at_once) -> None:
        """`repeats_first_token`: the client gets prefill's token from here; the engine's answer starts with it.
        `notify`: as for `newest_states`.
        """
        self._engine = engine
        self._skip = 0 if repeats_first_token else 1
        self._notify = notify

    def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        return spanned("decode", request, lambda within: self._run(within, context, handoff))

    def _run(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        def start() -> RequestOutput:
            result = self._engine.start_decode(request)
            handoff.decode_has_it()
            return result

        prefill = request.prefill_result
        details = prefill.prompt_tokens_details if prefill is not None else None
        cursor = OutputCursor(
            len(request.token_ids),
            skip=self._skip,
            cached_tokens=details.cached_tokens if details is not None else None,
            was_fetched=True,
            most_tokens=self._engine.most_tokens(request),
        )

        def record(result: RequestOutput) -> None:
            record_transfer(request.trace, result)
            record_engine(self._engine, request, result)

        # With a rendezvous the KV may never come, so an abort must not wait for the first output.
        deferred = request.rendezvous is None
        return _stream(
            self._engine, start, cursor, context, record, deferred_abort=deferred, notify=self._notify
        )

    def drain(self, request: GenerateRequest) -> None:
        """Fetch and drop an unused handoff, which frees its sender's blocks: a decode of one token, in the background.
        It works on every engine; a release message would not.
        """

        async def fetch() -> None:
            try:
                with request.span.child("drain"):
                    await self._engine.start_decode(request, max_tokens=1).aresult()
            except (self._engine.request_error, DisaggError) as error:
                # Best effort: the lease ends by itself.
                log.info("an unused handoff waits for the end of its lease: %s", error)

        in_background(fetch(), "drain of an unused handoff")


class LocalAgg:
    """context_and_generation: the whole answer on this worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return spanned("generate", request, lambda within: self._run(within, context))

    def _run(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        def record(result: RequestOutput) -> None:
            record_cache_hit(request, result)
            record_engine(self._engine, request, result)

        num_prompt, num_choices = len(request.token_ids), request.num_choices
        cursor: OutputCursor | ChoicesCursor = OutputCursor(num_prompt)
        if num_choices > 1:
            cursor = ChoicesCursor(num_prompt, num_choices, self._engine.most_tokens(request))
        start = partial(self._engine.start_agg, request)
        return _stream(self._engine, start, cursor, context, record, num_choices=num_choices)


async def _stream(
    engine: Engine,
    start: Callable[[], RequestOutput],
    cursor: OutputCursor | ChoicesCursor,
    context: RequestContext,
    on_finished: Callable[[RequestOutput], None] = lambda result: None,
    *,
    deferred_abort: bool = False,
    num_choices: int = 1,
    notify: Notify = at_once,
) -> AsyncGenerator[TokenChunk, None]:
    """The chunks of an engine request. `start` is called at the first read, `on_finished` before the last chunk."""
    result = start()
    with engine.answering, AbortGuard(engine, result, context, deferred=deferred_abort) as guard:
        async with (
            EngineErrors(engine, guard.failed),
            aclosing(newest_states(result, guard.may_abort, engine.cancel_at_death, notify)) as states,
        ):
            async for state in states:
                for chunk in cursor.advance(state):
                    if chunk.finish_reason is not None:
                        num_choices -= 1
                        if num_choices == 0:
                            on_finished(result)
                    yield chunk


def prefill_within(seconds: float, prefill: PrefillPhase) -> PrefillPhase:
    """`prefill`, which raises StageTimeoutError, and is aborted, after so many seconds."""

    async def timed(request: GenerateRequest, context: RequestContext) -> Handoff:
        try:
            async with asyncio.timeout(seconds):
                return await prefill(request, context)
        except TimeoutError:
            raise StageTimeoutError(f"the prefill was not done within {seconds:g} s") from None

    return timed


def first_token_within(seconds: float, decode: DecodePhase) -> DecodePhase:
    """`decode`, which raises StageTimeoutError after so many seconds, KV transfer included, without a token."""

    def timed(
        request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        return _FirstTokenWithin(seconds, decode(request, context, handoff))

    return timed


class _FirstTokenWithin(PerRequestStream[TokenChunk]):
    def __init__(self, seconds: float, chunks: AsyncGenerator[TokenChunk, None]) -> None:
        self._seconds = seconds
        self._rest = chunks

    async def _first(self) -> TokenChunk:
        assert self._rest is not None
        try:
            async with asyncio.timeout(self._seconds):
                return await anext(self._rest)
        except TimeoutError:
            raise StageTimeoutError(f"decode gave no token within {self._seconds:g} s") from None
