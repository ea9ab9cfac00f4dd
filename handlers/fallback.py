"""Fallback: when one way to answer fails, the next fallback step continues the answer where it stopped."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    InvalidRequestError,
    NoInstanceError,
    OverloadedError,
    PeerUnavailableError,
    StageTimeoutError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.remote import name_of
from trtllm_disagg.tracing.spans import NO_SPAN, Span
from trtllm_disagg.types import PROMPT_LOGPROBS, Generate, GenerateRequest, RequestContext, TokenChunk, Usage

log = logging.getLogger(__name__)


class Appended:
    """Appends the delivered tokens to the prompt, as Dynamo's migration does it.

    For answers in which a token depends on text, position and seed only (`depends_on_text_only`). Not exact: prefill
    sums a token's KV in another order than decode, so of two almost equally likely tokens the other one may come.
    """

    def __init__(self, request: GenerateRequest, delivered: list[int]) -> None:
        self._num_prompt = len(request.token_ids)
        self._num_delivered = len(delivered)
        tokens = [*request.token_ids, *delivered]
        stop = request.stop
        limits = {
            name: max(least, limit - len(delivered))
            for name, limit, least in (("max_tokens", stop.max_tokens, 1), ("min_tokens", stop.min_tokens, 0))
            if limit is not None
        }
        raw_stop = dict(request.raw.get("stop_conditions") or {}) | limits
        self.request = msgspec.structs.replace(
            request,
            raw=request.raw | {"token_ids": tokens, "stop_conditions": raw_stop},
            token_ids=tokens,
            stop=msgspec.structs.replace(stop, **limits),
        )

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        usage = chunk.completion_usage
        if usage is None:
            return chunk
        if chunk.of_prompt is not None and self._num_delivered:
            of_prompt = {PROMPT_LOGPROBS: chunk.of_prompt[PROMPT_LOGPROBS][: -self._num_delivered]}
            chunk = msgspec.structs.replace(chunk, engine_data=(chunk.engine_data or {}) | of_prompt)
        details = usage.prompt_tokens_details
        cached = min(self._num_prompt, (details.cached_tokens or 0) if details else 0)
        whole = Usage.of(self._num_prompt, usage.completion_tokens + self._num_delivered, cached)
        return msgspec.structs.replace(chunk, completion_usage=whole)


class Replayed:
    """Runs the request once more and drops the tokens that the client has.

    Correct also for answers that depend on more than the text: a grammar starts with the answer. With a seed, or with
    greedy sampling, the engine generates the same tokens again.
    """

    def __init__(self, request: GenerateRequest, delivered: list[int]) -> None:
        self.request = request
        self._repeats = list(reversed(delivered))

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        """The part of `chunk` that the client does not have, or None. Raises EngineError when it has other tokens, or
        ends before those that the client has.
        """
        if not self._repeats:
            return chunk
        count = min(len(self._repeats), len(chunk.token_ids))
        repeats = [self._repeats.pop() for _ in range(count)]
        ends_early = bool(self._repeats) and chunk.finish_reason not in (None, "cancelled")
        if chunk.token_ids[:count] != repeats or ends_early:
            raise EngineError("the answer cannot be continued: another worker began it differently")
        if count == 0:
            return chunk
        if count == len(chunk.token_ids) and chunk.finish_reason is None:
            return None
        return _without_first(chunk, count)


#: Continues an answer after its worker has failed: `request` asks for the rest, `new` drops what the client has.
Remainder = Appended | Replayed
#: Whether the answer to this request is continued by `Replayed`, and not by `Appended`.
Replays = Callable[[GenerateRequest], bool]


def always_replay(request: GenerateRequest) -> bool:
    """For engines that generate bit-identical answers. The replay takes as long as the first time."""
    return True


def replay_if_needed(request: GenerateRequest) -> bool:
    """For all other engines: append where that is correct."""
    return not depends_on_text_only(request)


def remainder_of(
    request: GenerateRequest, delivered: list[int], replays: Replays = replay_if_needed
) -> Remainder:
    return (Replayed if not delivered or replays(request) else Appended)(request, delivered)


def depends_on_text_only(request: GenerateRequest) -> bool:
    """Whether the engine treats prompt tokens and generated tokens alike. TensorRT-LLM does so with penalties, which
    count both (its docs, features/sampling.md), and with `max_thinking_tokens`, counted from the last start tag,
    wherever that is (`llmapi/thinking_budget.py`).
    """
    return not request.sampling.guided_decoding


def with_seed(request: GenerateRequest) -> GenerateRequest:
    """The request with a seed, drawn if it has none: without one a replay would give another answer."""
    sampling = request.sampling
    if sampling.seed is not None:
        return request
    seed = {"seed": secrets.randbits(31) or 1}
    raw_sampling = dict(request.raw.get("sampling_options") or {}) | seed
    return msgspec.structs.replace(
        request,
        raw=request.raw | {"sampling_options": raw_sampling},
        sampling=msgspec.structs.replace(sampling, **seed),
    )


#: The number of tokens that ends an answer; None where only the engine knows it.
MostTokens = Callable[[GenerateRequest], int | None]


def max_tokens_of(request: GenerateRequest) -> int | None:
    """The caller's own limit."""
    return request.stop.max_tokens


def has_ended(
    request: GenerateRequest, delivered: list[int], most_tokens: MostTokens = max_tokens_of
) -> bool:
    """Whether the client has the last token already, and only the finish reason was lost."""
    limit = most_tokens(request)
    return limit is not None and len(delivered) >= limit


def end_chunk(request: GenerateRequest, delivered: list[int]) -> TokenChunk:
    usage = Usage.of(len(request.token_ids), len(delivered), 0)
    return TokenChunk([], finish_reason="length", completion_usage=usage)


def _without_first(chunk: TokenChunk, count: int) -> TokenChunk:
    def rest(values: list[Any] | None) -> list[Any] | None:
        return values and values[count:]

    return msgspec.structs.replace(
        chunk,
        token_ids=chunk.token_ids[count:],
        log_probs=rest(chunk.log_probs),
        top_logprobs=rest(chunk.top_logprobs),
    )


class FallbackStep(NamedTuple):
    """One way to answer a whole request. `to` (a `Fallback`) names it in logs, metrics and answers."""

    to: str
    generate: Generate
    #: The strategy that this step runs; None: the chosen one.
    strategy: str | None = None
    #: The step does not use this worker's engine, and is only for requests that have lost that engine.
    without_engine: bool = False


def with_fallback(
    steps: Sequence[FallbackStep],
    replays: Replays = replay_if_needed,
    most_tokens: MostTokens = max_tokens_of,
) -> Generate:
    """A way to answer that tries the steps in order until one finishes the answer.

    The caller's faults are final, and so is an EngineError of this worker's own engine. Each step makes
    a handoff of its own. An instance that has failed is not called again for this request.
    """

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        progress = _Progress(with_seed(request) if replays(request) else request)
        for step in steps:
            if not progress.can_try(step):
                continue
            span = NO_SPAN
            if progress.error is not None:
                span = progress.fall_back(step, context)
                if has_ended(progress.request, progress.delivered, most_tokens):
                    yield end_chunk(progress.request, progress.delivered)
                    return
            rest = remainder_of(progress.request, progress.delivered, replays)
            try:
                async with _running(step, rest.request, span, context) as chunks:
                    async for chunk in chunks:
                        new = rest.new(chunk)
                        if new is not None:
                            progress.delivered += new.token_ids
                            progress.is_over = new.finish_reason is not None
                            yield new
                return
            except DisaggError as error:
                if progress.is_over:
                    log.info("request %s: failed after its end: %s", context.id(), error)
                    return
                if isinstance(rest, Appended) and isinstance(error, InvalidRequestError) and progress.error:
                    # The request is valid: the engine refuses it with the tokens that were appended to its prompt.
                    raise progress.error from None
                if context.is_stopped() or not _may_go_on(error):
                    raise
                progress.failed(step, error)
        if progress.error is not None:
            raise progress.error

    return generate


@asynccontextmanager
async def _running(
    step: FallbackStep, request: GenerateRequest, span: Span, context: RequestContext
) -> AsyncIterator[AsyncGenerator[TokenChunk, None]]:
    """The step's chunks, inside `span`."""
    with span:
        async with aclosing(step.generate(request.within(span), context)) as chunks:
            yield chunks


class _Progress:
    """The state of one request on its way through the steps: what its client has, and what has failed."""

    def __init__(self, request: GenerateRequest) -> None:
        #: The request, which avoids the instances that have failed.
        self.request = request
        self.delivered: list[int] = []
        self.is_over = False
        #: The error that the request fails with when no step is left.
        self.error: DisaggError | None = None
        self._failed_step = ""
        #: For the log: the strategy, or the fallback step.
        self._failed_name = ""
        #: The last step has found no instance, or was too slow on this worker's own engine.
        self._would_fail_again = False
        self._has_lost_engine = False

    def can_try(self, step: FallbackStep) -> bool:
        """False for a step that would fail once more as it has just done, or that does not suit the engine's state."""
        is_in_vain = self._would_fail_again and self._failed_step == step.to
        return step.without_engine is self._has_lost_engine and not is_in_vain

    def failed(self, step: FallbackStep, error: DisaggError) -> None:
        self._failed_step = step.to
        self._failed_name = step.to if self.error is not None else self.request.trace.strategy
        found_no_instance = isinstance(error, NoInstanceError)
        is_own_timeout = isinstance(error, StageTimeoutError) and error.peer is None
        self._would_fail_again = found_no_instance or is_own_timeout
        # The failure of the last instance is a better reason than that there is no other one.
        if self.error is None or not found_no_instance:
            self.error = error
        self._has_lost_engine = self._has_lost_engine or isinstance(error, WorkerLeavingError)
        if error.peer is not None:
            self.request = self.request.avoiding(error.peer)

    def fall_back(self, step: FallbackStep, context: RequestContext) -> Span:
        """Record that `step` is tried next, and return the span for it."""
        assert self.error is not None, "the first step is no fallback"
        request, error = self.request, self.error
        where = "" if error.peer is None else f" at {name_of(error.peer)}"
        log.warning(
            "request %s: %s failed after %d tokens%s (%s); trying %s",
            *(context.id(), self._failed_name, len(self.delivered), where, error, step.to),
        )
        request.trace.fell_back(step.to, error)
        if error.peer is not None:
            request.trace.forget(error.peer)
        request.trace.strategy = step.strategy or request.trace.strategy
        return request.span.child("fallback", {"to": step.to, "because": str(error)})


def _may_go_on(error: DisaggError) -> bool:
    if isinstance(error, EngineError):  # only if another worker's engine failed
        return error.peer is not None
    return isinstance(error, (PeerUnavailableError, StageTimeoutError, OverloadedError, WorkerLeavingError))
