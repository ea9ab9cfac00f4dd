"""Tracks the tokens that a client has, and generates the missing ones after a failure or a migration.

Migration: when a worker dies, Dynamo's frontend sends its requests, with their tokens so far, to another worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from trtllm_disagg.errors import EngineError
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.types import PROMPT_LOGPROBS, GenerateRequest, TokenChunk, Usage
from trtllm_disagg.wire.migration_link import MigrationLink


class Appended:
    """Appends the delivered tokens to the prompt, as Dynamo's migration does.

    For answers where a token depends only on text, position and seed. Not exact: prefill sums a token's KV in another
    order than decode, which can swap two almost equally likely tokens.
    """

    def __init__(self, request: GenerateRequest, delivered: list[int]) -> None:
        self._original = request
        self._num_delivered = len(delivered)
        tokens = [*request.token_ids, *delivered]
        stop = request.stop
        limits = {
            name: max(least, limit - len(delivered))
            for name, limit, least in (("max_tokens", stop.max_tokens, 1), ("min_tokens", stop.min_tokens, 0))
            if limit is not None
        }
        raw_stop = dict(request.raw.get("stop_conditions") or {}) | limits
        raw = request.raw | {"token_ids": tokens, "stop_conditions": raw_stop}
        raw.pop("mm_routing_info", None)  # of the prompt alone
        self.request = msgspec.structs.replace(
            request,
            raw=raw,
            token_ids=tokens,
            num_appended=len(delivered),
            stop=msgspec.structs.replace(stop, **limits),
        )

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        usage = chunk.completion_usage
        if usage is None:
            return chunk
        if chunk.of_prompt is not None:
            of_prompt = {PROMPT_LOGPROBS: chunk.of_prompt[PROMPT_LOGPROBS][: -self._num_delivered]}
            chunk = msgspec.structs.replace(chunk, engine_data=(chunk.engine_data or {}) | of_prompt)
        details = usage.prompt_tokens_details
        num_prompt = self._original.num_prompt
        cached = min(num_prompt, (details.cached_tokens or 0) if details else 0)
        whole = Usage.of(num_prompt, usage.completion_tokens + self._num_delivered, cached)
        return msgspec.structs.replace(chunk, completion_usage=whole)


class Replayed:
    """Runs the request again and drops the tokens that the client has.

    Also correct where more than the text counts: a grammar starts with the answer. With a seed or greedy sampling the
    engine generates the same tokens again.
    """

    def __init__(self, request: GenerateRequest, delivered: list[int]) -> None:
        self.request = request
        self._repeats = list(reversed(delivered))

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        """The part of `chunk` that the client lacks, or None. Raises EngineError if its tokens differ from the
        client's, or end before them.
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


#: Continues an answer after its worker failed: `request` asks for the missing tokens, `new` drops what the client has.
Remainder = Appended | Replayed
#: Whether `Replayed` continues this request's answer, not `Appended`.
Replays = Callable[[GenerateRequest], bool]


def always_replay(request: GenerateRequest) -> bool:
    """For engines with bit-identical answers. The replay takes as long as the first run."""
    return True


def replay_if_needed(request: GenerateRequest) -> bool:
    """For all other engines: append where the engine treats prompt and generated tokens alike. TensorRT-LLM does so for
    penalties (its docs, features/sampling.md) and for `max_thinking_tokens`, counted from the last start tag
    (`llmapi/thinking_budget.py`).
    """
    return bool(request.sampling.guided_decoding)


def with_seed(request: GenerateRequest) -> GenerateRequest:
    """The request with a seed, drawn if missing: without one a replay would give another answer."""
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


def _without_first(chunk: TokenChunk, count: int) -> TokenChunk:
    def remaining(values: list[Any] | None) -> list[Any] | None:
        return values and values[count:]

    return msgspec.structs.replace(
        chunk,
        token_ids=chunk.token_ids[count:],
        log_probs=remaining(chunk.log_probs),
        top_logprobs=remaining(chunk.top_logprobs),
    )


def resumed(request: GenerateRequest, replays: Replays) -> tuple[GenerateRequest, list[int], MigrationLink]:
    """(the request, seeded if `replays` accepts it; the tokens that its client has; the link for its next migration).
    `request`: as a frontend sends it.
    """
    migrated = request.migrated
    had_a_seed = request.sampling.seed is not None and (migrated is None or not migrated.seed)
    if replays(request):
        request = with_seed(request)
    seed = 0 if had_a_seed else request.sampling.seed or 0
    delivered = [] if migrated is None else migrated.delivered
    return request, delivered, MigrationLink(len(request.token_ids), seed)


class Delivered:
    """What the client has of one answer. `begin` makes the request of an attempt, `new` drops what the client has."""

    def __init__(self, tokens: list[int], replays: Replays, facts: PairFacts) -> None:
        self.tokens = list(tokens)
        self._replays = replays
        self._facts = facts
        #: `PairFacts.max_new_tokens` of the engines that generated the tokens.
        self._max_new_tokens: int | None = None
        #: None while the client has nothing.
        self._remainder: Remainder | None = None

    @property
    def are_appended(self) -> bool:
        """The running attempt has the tokens in its prompt."""
        return isinstance(self._remainder, Appended)

    def is_complete(self, request: GenerateRequest) -> bool:
        """Whether the client lacks only the finish reason. A request migrated just before that comes with `max_tokens`
        0.
        """
        limit = request.stop.max_tokens
        if self.tokens:
            limit = self._max_new_tokens or self._facts.max_new_tokens(request)
        return limit is not None and len(self.tokens) >= limit

    def end_chunk(self, request: GenerateRequest) -> TokenChunk:
        usage = Usage.of(request.num_prompt, len(self.tokens), 0)
        return TokenChunk([], finish_reason="length", completion_usage=usage)

    def begin(self, request: GenerateRequest) -> GenerateRequest:
        """A request that is too long with the tokens appended is replayed on any engine."""
        self._max_new_tokens = self._facts.max_new_tokens(request) or self._max_new_tokens
        if not self.tokens:
            return request
        self._remainder = Replayed(request, self.tokens)
        if not self._replays(request):
            appended = Appended(request, self.tokens)
            if self._facts.fits(appended.request):
                self._remainder = appended
        return self._remainder.request

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        """The part of a chunk that the client lacks, or None. Raises EngineError, as `Replayed`."""
        new = chunk if self._remainder is None else self._remainder.new(chunk)
        if new is not None:
            self.tokens += new.token_ids
        return new
