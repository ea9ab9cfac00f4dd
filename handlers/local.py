"""The phases that run on this worker's own engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

import msgspec

from trtllm_disagg.engine.capabilities import RELEASES_HANDOFFS
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    RequestCancelledError,
    StageTimeoutError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.cancellation import AbortGuard, abort_when_stopped, guarded, in_background
from trtllm_disagg.handlers.engine_spans import record_engine, spanned
from trtllm_disagg.handlers.streams import PerRequestStream
from trtllm_disagg.handlers.trace import record_cache_hit, record_transfer
from trtllm_disagg.types import (
    PROMPT_LOGPROBS,
    DecodePhase,
    GenerateRequest,
    Handoff,
    PrefillPhase,
    PrefillResult,
    RequestContext,
    TokenChunk,
    Usage,
)
from trtllm_disagg.wire.bodies import encode_disaggregated_params, names_a_sender


class OutputCursor:
    """RequestOutput of the LLM API (cumulative) -> TokenChunks (what is new), for one choice."""

    def __init__(
        self,
        num_prompt: int,
        *,
        skip: int = 0,
        cached_tokens: int | None = None,
        was_fetched: bool = False,
        choice: int = 0,
    ) -> None:
        """`skip` tokens have reached the client already; `cached_tokens` wins over this engine's count, which of KV
        that `was_fetched` has all of it. `choice` is a place in the result's `outputs`.
        """
        self._num_prompt = num_prompt
        self._position = skip
        self._cached_tokens = cached_tokens
        self._was_fetched = was_fetched
        self._choice = choice
        self._has_ended = False

    def advance(self, result: Any) -> Sequence[TokenChunk]:
        """What came since the last call, one chunk or none. Raises StageTimeoutError."""
        output = result.outputs[self._choice]
        tokens = output.token_ids[self._position :]
        if self._has_ended or not (tokens or output.finish_reason):
            return ()
        log_probs, top_logprobs = None, None
        if output.logprobs:
            log_probs, top_logprobs = _logprobs(output, self._position, tokens)
        self._position += len(tokens)
        chunk = TokenChunk(list(tokens), output.index, log_probs, top_logprobs)
        return (chunk,) if output.finish_reason is None else (self._end(chunk, result, output),)

    def _end(self, chunk: TokenChunk, result: Any, output: Any) -> TokenChunk:
        if output.finish_reason == "timeout":  # Dynamo's frontend has no such end
            raise StageTimeoutError("the engine ran out of time for this request")
        self._has_ended = True
        cached, told = self._cached(result, output)
        if (of_prompt := _prompt_logprobs(output)) is not None:
            told[PROMPT_LOGPROBS] = of_prompt
        # What the other choices have so far; the last one to end has all.
        num_made = sum(len(each.token_ids) for each in result.outputs)
        return msgspec.structs.replace(
            chunk,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            completion_usage=Usage.of(self._num_prompt, num_made, cached),
            engine_data=told or None,
        )

    def _cached(self, result: Any, output: Any) -> tuple[int, dict[str, Any]]:
        """Tokens of the prompt that no engine had to compute, and what to tell of the engine's own count."""
        if self._cached_tokens is not None:
            return self._cached_tokens, {}
        counted = min(result.cached_tokens or 0, self._num_prompt)
        measured = getattr(output.request_perf_metrics, "kv_cache_metrics", None)
        if not self._was_fetched or measured is None:
            return counted, {}
        total = measured.num_reused_blocks + measured.num_missed_blocks
        own = self._num_prompt * measured.num_reused_blocks // total if total else 0
        return min(own, max(self._num_prompt - 1, 0)), {
            "cached_tokens_engine_reported": result.cached_tokens or 0
        }


class ChoicesCursor:
    """The same for a request with several choices: a chunk for each that has grown."""

    def __init__(self, num_prompt: int, num_choices: int) -> None:
        self._cursors = [OutputCursor(num_prompt, choice=choice) for choice in range(num_choices)]

    def advance(self, result: Any) -> Sequence[TokenChunk]:
        return [chunk for cursor in self._cursors for chunk in cursor.advance(result)]


def _logprobs(
    output: Any, position: int, tokens: list[int]
) -> tuple[list[float] | None, list[list[dict[str, Any]]] | None]:
    """None when one is missing: a shorter list would be read as the logprobs of other tokens."""
    entries = output.logprobs[position : position + len(tokens)]
    if not tokens or len(entries) < len(tokens):
        return None, None
    if isinstance(entries[0], float):  # TensorRT-LLM, when the request asks for no alternatives
        return list(entries), None
    if not all(entries):
        return None, None
    # Some TensorRT-LLM leaves out the token that it has drawn; Dynamo's worker takes the likeliest one's instead.
    chosen = [
        (entry.get(token) or next(iter(entry.values()))).logprob
        for token, entry in zip(tokens, entries, strict=True)
    ]
    top = [
        [
            {"rank": lp.rank or 0, "token_id": token, "token": None, "logprob": lp.logprob}
            for token, lp in entry.items()
        ]
        for entry in entries
    ]
    return chosen, top


def _prompt_logprobs(output: Any) -> list[dict[str, dict[str, Any]] | None] | None:
    """As Dynamo's frontend reads them; None when the engine has computed none."""
    if not output.prompt_logprobs:
        return None
    return [
        entry
        and {
            str(token): {"logprob": lp.logprob} | ({} if lp.rank is None else {"rank": lp.rank})
            for token, lp in entry.items()
        }
        for entry in output.prompt_logprobs
    ]


#: Inside, the task, which reads the result, is cancelled when what it waits for is gone.
AwaitedBy = Callable[[asyncio.Future[Any], Any], AbstractContextManager[None]]


def _as_long_as_it_takes(reading: asyncio.Future[Any], result: Any) -> AbstractContextManager[None]:
    return nullcontext()


async def newest_states(
    result: Any, on_output: Callable[[], None], awaited_by: AwaitedBy = _as_long_as_it_takes
) -> AsyncGenerator[Any, None]:
    """Reads an engine's output as fast as it comes, however slow the way to the client is: `result` (a RequestOutput,
    cumulative) when it has grown: once for all that came while the caller was busy. What
    comes alone never waits. Raises what iterating the result raises, behind the last state, and CancelledError when
    `awaited_by` has ended it.

    `on_output` is called for each output of the engine, also while the caller is busy.
    """
    news = asyncio.Event()

    async def read() -> None:
        try:
            async for _ in result:
                on_output()
                news.set()
        finally:
            news.set()

    reader = asyncio.create_task(read(), name="read-ahead")
    try:
        with awaited_by(reader, result):
            has_ended = False
            while not has_ended:
                await news.wait()
                news.clear()
                has_ended = reader.done()
                yield result
        await reader
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reader


class LocalPrefill:
    """context_only: the prompt's KV, and the first token."""

    def __init__(
        self,
        engine: Engine,
        drain: Callable[[GenerateRequest], None] = lambda request: None,
        *,
        sees_callers_max_tokens: bool = True,
    ) -> None:
        """`drain` has a decode worker fetch a handoff that no decode takes, for an engine that cannot release it.
        Dynamo's router calls prefill with max_tokens 1; that says nothing about what the caller wants.
        """
        self._engine = engine
        self._drain = None if RELEASES_HANDOFFS in engine.capabilities else drain
        self._sees_callers_max_tokens = sees_callers_max_tokens

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        with request.span.child("prefill") as span:
            return await self._run(request.within(span), context)

    async def _run(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        if self._is_all(request):
            return await self._whole(request, context)
        result = self._engine.start_prefill(request)
        guard = AbortGuard(result, deferred=False)
        try:
            await finished(self._engine, result, context, guard)
            if context.is_stopped():
                raise RequestCancelledError("the client left during prefill")
        except BaseException:
            if result.finished:  # meanwhile
                self._let_go(request, result, guard)
            raise
        return self._handoff(request, context, result)

    def _is_all(self, request: GenerateRequest) -> bool:
        """The first token is the answer: KV that was kept for a decode would wait for none."""
        is_the_only_one = self._sees_callers_max_tokens and request.stop.max_tokens == 1
        return is_the_only_one and not request.decode_follows

    async def _whole(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        result = self._engine.start_both(request, streaming=False)
        await finished(self._engine, result, context)
        if context.is_stopped():
            raise RequestCancelledError("the client left during prefill")
        chunk = self._first(request, result)
        if chunk.finish_reason in _ENDS_OF_EVERY_PREFILL:
            chunk = msgspec.structs.replace(chunk, finish_reason="length")
        return Handoff(chunk, None)

    def _first(self, request: GenerateRequest, result: Any) -> TokenChunk:
        chunks = OutputCursor(len(request.token_ids)).advance(result)
        if not chunks or chunks[0].finish_reason == "cancelled":
            raise EngineError("the engine ended the prefill without a token")
        record_cache_hit(request, result)
        record_engine(self._engine, request, result)
        return chunks[0]

    def _handoff(self, request: GenerateRequest, context: RequestContext, result: Any) -> Handoff:
        try:
            chunk = self._first(request, result)
            if chunk.finish_reason not in _ENDS_OF_EVERY_PREFILL:
                if self._drain is None:
                    result.abort()
                return Handoff(chunk, None)
            passed = self._result(chunk, result)
        except BaseException:
            result.abort()
            raise
        ended = self._engine.handoffs.hold()
        handoff = Handoff(chunk.without_end(), passed, _ended=ended, of_prompt=chunk.of_prompt)
        handoff.on_release(lambda: self._release(request, context, result, handoff))
        return handoff

    def _result(self, chunk: TokenChunk, result: Any) -> PrefillResult:
        params = result.outputs[0].disaggregated_params
        encoded = encode_disaggregated_params(params) if params is not None else {}
        if not names_a_sender(encoded):
            raise EngineError("the engine finished the prefill without disaggregated_params")
        usage = chunk.completion_usage
        return PrefillResult(encoded, usage.prompt_tokens_details if usage is not None else None)

    def _release(
        self, request: GenerateRequest, context: RequestContext, result: Any, handoff: Handoff
    ) -> None:
        if self._drain is None:
            result.abort()
        elif not (handoff.is_asked_for and context.is_stopped()):
            # A decode worker that loses its client fetches before it stops; to fetch twice is an error of its engine.
            self._drain(request.with_handoff(handoff))

    def _let_go(self, request: GenerateRequest, result: Any, guard: AbortGuard) -> None:
        """Of a prefill that has ended, and that no answer speaks of."""
        if self._drain is None:
            guard.abort()
            return
        with contextlib.suppress(DisaggError):  # there is nothing to fetch
            passed = self._result(self._first(request, result), result)
            self._drain(msgspec.structs.replace(request, prefill_result=passed))


async def finished(
    engine: Engine, result: Any, context: RequestContext, guard: AbortGuard | None = None
) -> None:
    """Wait for the end of a request; a client that leaves ends it, by `guard`."""
    guard = guard or AbortGuard(result, deferred=False)
    async with guarded(guard, result, context), engine_errors(engine, guard):
        await engine.finished(result)


#: context_only ends like this after its one token; it says nothing about the answer.
_ENDS_OF_EVERY_PREFILL = ("length", "not_finished", None)


class LocalDecode:
    """generation_only: fetches the KV and goes on from the first token."""

    def __init__(self, engine: Engine, *, repeats_first_token: bool) -> None:
        """The engine's answer starts with prefill's token; say whether the client has to get it from here."""
        self._engine = engine
        self._skip = 0 if repeats_first_token else 1

    def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        return spanned("decode", request, lambda within: self._run(within, context, handoff))

    def _run(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        def start() -> Any:
            result = self._engine.start_decode(request)
            handoff.taken()
            return result

        prefill = request.prefill_result
        details = prefill.prompt_tokens_details if prefill is not None else None
        cursor = OutputCursor(
            len(request.token_ids),
            skip=self._skip,
            cached_tokens=details.cached_tokens if details is not None else None,
            was_fetched=True,
        )

        def finished(result: Any) -> None:
            record_transfer(request.trace, result)
            record_engine(self._engine, request, result)

        # With a rendezvous nothing may ever come, so an abort does not wait for it.
        deferred = request.rendezvous is None
        return _stream(self._engine, start, cursor, context, finished, deferred_abort=deferred)

    def drain(self, request: GenerateRequest) -> None:
        """Fetch and drop an unused handoff: that is how its sender's blocks come free.

        One token, in the background. It works the same on every engine, which a release message would not.
        """

        async def fetch() -> None:
            # Best effort: the lease ends by itself.
            with contextlib.suppress(self._engine.request_error, DisaggError), request.span.child("drain"):
                await self._engine.start_decode(request, max_tokens=1).aresult()

        in_background(fetch())


class LocalBoth:
    """context_and_generation: the whole answer here."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return spanned("generate", request, lambda within: self._run(within, context))

    def _run(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        def finished(result: Any) -> None:
            record_cache_hit(request, result)
            record_engine(self._engine, request, result)

        num_prompt, num_choices = len(request.token_ids), request.num_choices
        cursor = OutputCursor(num_prompt) if num_choices == 1 else ChoicesCursor(num_prompt, num_choices)
        return _stream(self._engine, lambda: self._engine.start_both(request), cursor, context, finished)


async def _stream(
    engine: Engine,
    start: Callable[[], Any],
    cursor: OutputCursor | ChoicesCursor,
    context: RequestContext,
    finished: Callable[[Any], None] = lambda result: None,
    *,
    deferred_abort: bool = False,
) -> AsyncGenerator[TokenChunk, None]:
    """`start` asks the engine once a chunk is wanted; `finished` hears of the result before its end leaves."""
    result = start()
    async with (
        abort_when_stopped(result, context, deferred=deferred_abort) as guard,
        engine_errors(engine, guard),
        aclosing(newest_states(result, guard.may_abort, engine.awaited_by)) as states,
    ):
        async for state in states:
            for chunk in cursor.advance(state):
                if chunk.finish_reason is not None:
                    finished(result)
                yield chunk


@contextlib.asynccontextmanager
async def engine_errors(engine: Engine, guard: AbortGuard) -> AsyncIterator[None]:
    """What the engine raises -> ours. `guard` hears of it: there is nothing left to abort."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if engine.death is None or (task is not None and task.cancelling()):
            raise
        raise WorkerLeavingError(f"the engine is dead: {engine.death}") from None
    except DisaggError:
        raise
    except Exception as error:
        guard.failed()
        raise await engine.failure(error) from error


def prefill_within(seconds: float, prefill: PrefillPhase) -> PrefillPhase:
    """Raises StageTimeoutError; leaving the phase aborts it."""

    async def timed(request: GenerateRequest, context: RequestContext) -> Handoff:
        try:
            async with asyncio.timeout(seconds):
                return await prefill(request, context)
        except TimeoutError:
            raise StageTimeoutError(f"the prefill was not done within {seconds:g} s") from None

    return timed


def first_token_within(seconds: float, decode: DecodePhase) -> DecodePhase:
    """The transfer of the KV is in that time."""

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
