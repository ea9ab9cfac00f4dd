"""Fallback: when one way to answer fails, the next step goes on where it stopped."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    NoInstanceError,
    OverloadedError,
    PeerUnavailableError,
    StageTimeoutError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.streams import PerRequestStream
from trtllm_disagg.tracing.spans import NO_SPAN
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk, Usage

log = logging.getLogger(__name__)


class Remainder(Protocol):
    """The rest of an answer after its worker has failed, nothing repeated and nothing left out: what is asked for, and
    what of its answer is new to the client.
    """

    @property
    def request(self) -> GenerateRequest: ...

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        """None when the client has all of it. Raises EngineError when it is another answer than the first one."""
        ...


@dataclass(frozen=True, slots=True)
class Everything:
    """Nothing has been delivered."""

    request: GenerateRequest

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        return chunk


class Appended:
    """What the client has becomes part of the prompt, as Dynamo's migration does it.

    For answers with a next token that depends on text, position and seed only (`depends_on_text_only`).
    Prefill computes a token's KV by other sums than decoding did, so of two tokens that are all but equally likely
    the other one may come.
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
        details = usage.prompt_tokens_details
        cached = min(self._num_prompt, (details.cached_tokens or 0) if details else 0)
        whole = Usage.of(self._num_prompt, usage.completion_tokens + self._num_delivered, cached)
        return msgspec.structs.replace(chunk, completion_usage=whole)


class Replayed:
    """The same request once more, and its answer without what the client has.

    Exact, and right for answers that depend on more than the text, too: penalties count generated tokens only, a
    grammar starts with the answer. With a seed (or none to draw) the engine gives the same tokens again.
    """

    def __init__(self, request: GenerateRequest, delivered: list[int]) -> None:
        self.request = request
        self._repeats = list(reversed(delivered))

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        count = min(len(self._repeats), len(chunk.token_ids))
        for token in chunk.token_ids[:count]:
            if token != self._repeats.pop():
                raise EngineError("the answer cannot be continued: another worker began it differently")
        if count == 0:
            return chunk
        if count == len(chunk.token_ids) and chunk.finish_reason is None:
            return None
        return _without_first(chunk, count)


#: Is the answer to this request gone on with by giving it once more?
Replays = Callable[[GenerateRequest], bool]


def always(request: GenerateRequest) -> bool:
    """For engines that give the same answer again to the bit. It takes as long as it did the first time."""
    return True


def replay_if_needed(request: GenerateRequest) -> bool:
    """For all others: what can be appended is."""
    return not depends_on_text_only(request)


def remainder_of(
    request: GenerateRequest, delivered: list[int], replays: Replays = replay_if_needed
) -> Remainder:
    if not delivered:
        return Everything(request)
    return (Replayed if replays(request) else Appended)(request, delivered)


def depends_on_text_only(request: GenerateRequest) -> bool:
    """Prompt and answer may be one text to the sampler."""
    sampling = request.sampling
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    return not any(penalties) and sampling.repetition_penalty in (None, 1.0) and not sampling.guided_decoding


def with_seed(request: GenerateRequest) -> GenerateRequest:
    """An answer that may have to be given twice needs a seed, or it would be another one."""
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


def has_ended(request: GenerateRequest, delivered: list[int]) -> bool:
    """The client has the last token; only the end itself was lost."""
    limit = request.stop.max_tokens
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
    """One way to answer a whole request. `to` names it in logs, metrics and answers."""

    to: str
    generate: Generate
    #: What runs then, if it is not what was chosen.
    strategy: str | None = None
    #: It has no use for this worker's own engine, and is for requests that have lost their engine.
    without_engine: bool = False


def with_fallback(steps: Sequence[FallbackStep], replays: Replays = replay_if_needed) -> Generate:
    """The first step, else the next one, bounded by their number.

    The caller's faults are final, and so is what this worker's own engine fails at, unless it is dead. Each step makes
    a handoff of its own. An instance that has failed is not asked again for this request.
    """

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        request = with_seed(request) if replays(request) else request
        delivered: list[int] = []
        is_over = is_alone = has_no_engine = False
        error: DisaggError | None = None
        attempt = NO_SPAN
        for place, step in enumerate(steps):
            if step.without_engine is not has_no_engine:
                continue
            if is_alone and step.to == steps[place - 1].to:
                continue  # it would find no other one either
            if error is not None:
                log.warning(
                    "request %s: %s after %d tokens: %s", context.id(), step.to, len(delivered), error
                )
                request.trace.fell_back(step.to, error)
                request.trace.strategy = step.strategy or request.trace.strategy
                if has_ended(request, delivered):
                    yield end_chunk(request, delivered)
                    return
                attempt = request.span.child("fallback", {"to": step.to, "because": str(error)})
            rest = remainder_of(request, delivered, replays)
            asked = rest.request.within(attempt)
            try:
                with attempt:
                    async with aclosing(step.generate(asked, context)) as chunks:
                        async for chunk in chunks:
                            new = rest.new(chunk)
                            if new is not None:
                                delivered += new.token_ids
                                is_over = new.finish_reason is not None
                                yield new
                return
            except DisaggError as failed:
                if is_over:
                    log.info("request %s: failed after its end: %s", context.id(), failed)
                    return
                if context.is_stopped() or not _may_go_on(failed):
                    raise
                if error is None or not isinstance(failed, NoInstanceError):
                    error = failed
                is_alone = isinstance(failed, NoInstanceError)
                has_no_engine = has_no_engine or isinstance(failed, WorkerLeavingError)
                if failed.peer is not None:
                    request = request.avoiding(failed.peer)
        if error is not None:
            raise error

    return generate


def _may_go_on(error: DisaggError) -> bool:
    if isinstance(error, EngineError):  # of another worker's engine
        return error.peer is not None
    return isinstance(error, (PeerUnavailableError, StageTimeoutError, OverloadedError, WorkerLeavingError))


def finish_if_budget_exhausted(generate: Generate) -> Generate:
    """Answers a request for the end of an answer only: a worker died when it had given the last token and not yet
    said so, and the frontend migrates the request with `max_tokens` 0.
    """

    def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        if has_ended(request, []):
            request.trace.chose("local", "nothing_left")
            return _end(request, [])
        return generate(request, context)

    return answer


async def _end(request: GenerateRequest, delivered: list[int]) -> AsyncGenerator[TokenChunk, None]:
    yield end_chunk(request, delivered)


#: Tells our links from those of a tracing library.
_MARK = "7472746c6c6d6467"
_HEX = re.compile(r"[0-9a-f]{16}")
_LINK = "migration_link"


class Start(NamedTuple):
    """How a request began, as its answer says it to the worker that goes on with it after a migration.

    Dynamo appends the tokens that the client has to the prompt and takes them from `max_tokens`. That forgets which of
    them were generated: penalties begin anew, usage counts them as prompt, and where prefill's sums differ from
    decode's another token may come. Dynamo does not say where the prompt ends, but it returns to the next worker what
    the last one has put into `worker_trace_link`, as `migration_link` (decision 22). So each answer says there how
    long its prompt is, and which seed it was given.
    """

    num_prompt: int
    #: That it was given because it had none; 0 when it had one.
    seed: int

    def as_link(self) -> dict[str, str]:
        """As W3C ids look: 32 and 16 hexadecimal digits."""
        return {"trace_id": f"{_MARK}{self.seed:016x}", "span_id": f"{self.num_prompt:016x}"}

    @classmethod
    def read(cls, link: Any) -> Start | None:
        """None for what is no link of ours."""
        if not isinstance(link, dict):
            return None
        trace_id, span_id = str(link.get("trace_id")), str(link.get("span_id"))
        seed = trace_id.removeprefix(_MARK)
        if not (trace_id.startswith(_MARK) and _HEX.fullmatch(seed) and _HEX.fullmatch(span_id)):
            return None
        return cls(int(span_id, 16), int(seed, 16))


def resume_migrated(generate: Generate, replays: Replays) -> Generate:
    """`generate`, for requests from frontends; what was migrated is given once more, without what the client has.

    `replays` says of which requests; the others go on as Dynamo has them.
    """

    def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        start = Start.read(request.raw.get(_LINK))
        asked, delivered = _as_it_began(request, start) if start is not None else (request, [])
        # Which tokens of several choices the client has is said by none.
        if request.phase_request is not None or request.num_choices > 1 or not replays(asked):
            return generate(request, context)
        if delivered and has_ended(asked, delivered):
            asked.trace.chose("local", "nothing_left")
            return _end(asked, delivered)
        had_a_seed = asked.sampling.seed is not None and (start is None or not start.seed)
        asked = with_seed(asked)
        seed = 0 if had_a_seed else asked.sampling.seed or 0
        rest = remainder_of(asked, delivered, replays)
        chunks = generate(rest.request, context)
        if delivered:
            chunks = _new_ones(rest, chunks)
        return _Linked(Start(len(asked.token_ids), seed).as_link(), chunks)

    return answer


async def _new_ones(
    rest: Remainder, chunks: AsyncGenerator[TokenChunk, None]
) -> AsyncGenerator[TokenChunk, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            new = rest.new(chunk)
            if new is not None:
                yield new


class _Linked(PerRequestStream[TokenChunk]):
    """The first chunk has the link: in each chunk it would cost 0.1 kB a token."""

    def __init__(self, link: dict[str, str], chunks: AsyncGenerator[TokenChunk, None]) -> None:
        self._link = link
        self._rest = chunks

    async def _first(self) -> TokenChunk:
        assert self._rest is not None
        return msgspec.structs.replace(await anext(self._rest), worker_trace_link=self._link)


def _as_it_began(request: GenerateRequest, start: Start) -> tuple[GenerateRequest, list[int]]:
    """The request before it was migrated, and the tokens that the client has."""
    tokens = request.token_ids
    if not 0 < start.num_prompt <= len(tokens):
        return request, []
    prompt, delivered = tokens[: start.num_prompt], tokens[start.num_prompt :]
    stop, sampling = request.stop, request.sampling
    raw = {key: value for key, value in request.raw.items() if key != _LINK} | {"token_ids": prompt}
    if stop.max_tokens is not None:
        limit = {"max_tokens": stop.max_tokens + len(delivered)}
        stop = msgspec.structs.replace(stop, **limit)
        raw["stop_conditions"] = dict(raw.get("stop_conditions") or {}) | limit
    if start.seed and sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=start.seed)
        raw["sampling_options"] = dict(raw.get("sampling_options") or {}) | {"seed": start.seed}
    return msgspec.structs.replace(
        request, raw=raw, token_ids=prompt, stop=stop, sampling=sampling
    ), delivered
