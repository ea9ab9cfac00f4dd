"""The tokens that a client has, and how the remaining ones are made after a failure or a migration.

Migration: when a worker dies, Dynamo's frontend sends its requests, with the tokens so far, to another worker.
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
    """Appends the delivered tokens to the prompt, as Dynamo's migration does it.

    For answers in which a token depends on text, position and seed only. Not exact: prefill
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

    #: A chunk without usage passes as it is.
    passes = True

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
        self.passes = not delivered

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        """The part of `chunk` that the client does not have, or None. Raises EngineError when it has other tokens, or
        ends before those that the client has.
        """
        if not self._repeats:
            return chunk
        count = min(len(self._repeats), len(chunk.token_ids))
        repeats = [self._repeats.pop() for _ in range(count)]
        self.passes = not self._repeats
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
    """For all other engines: append where the engine treats prompt tokens and generated tokens alike. TensorRT-LLM does
    so with penalties, which count both (its docs, features/sampling.md), and with `max_thinking_tokens`, counted from
    the last start tag, wherever that is (`llmapi/thinking_budget.py`).
    """
    return bool(request.sampling.guided_decoding)


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


def _without_first(chunk: TokenChunk, count: int) -> TokenChunk:
    def rest(values: list[Any] | None) -> list[Any] | None:
        return values and values[count:]

    return msgspec.structs.replace(
        chunk,
        token_ids=chunk.token_ids[count:],
        log_probs=rest(chunk.log_probs),
        top_logprobs=rest(chunk.top_logprobs),
    )


def resumed(request: GenerateRequest, replays: Replays) -> tuple[GenerateRequest, list[int], MigrationLink]:
    """(the request, with a seed from now on if `replays` accepts it, the tokens that its client has, the link for its
    next migration). `request`: as a frontend sends it.
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

    def __init__(self, tokens: list[int], replays: Replays, limits: PairFacts) -> None:
        self.tokens = list(tokens)
        self._replays = replays
        self._limits = limits
        #: `PairFacts.most_tokens` of the engines that made the tokens.
        self._most_tokens: int | None = None
        self._remainder: Remainder | None = None

    @property
    def are_appended(self) -> bool:
        """The attempt that runs has the tokens in its prompt."""
        return isinstance(self._remainder, Appended)

    def is_complete(self, request: GenerateRequest) -> bool:
        """Whether the client has the last token already, and lacks only the finish reason. A request that was migrated
        between the two comes with `max_tokens` 0.
        """
        limit = request.stop.max_tokens
        if self.tokens:
            limit = self._most_tokens or self._limits.most_tokens(request)
        return limit is not None and len(self.tokens) >= limit

    def end_chunk(self, request: GenerateRequest) -> TokenChunk:
        usage = Usage.of(len(request.token_ids), len(self.tokens), 0)
        return TokenChunk([], finish_reason="length", completion_usage=usage)

    def begin(self, request: GenerateRequest) -> GenerateRequest:
        """A request that is too long with the tokens appended is replayed, whatever its engine."""
        self._most_tokens = self._limits.most_tokens(request) or self._most_tokens
        self._remainder = Replayed(request, self.tokens)
        if self.tokens and not self._replays(request):
            appended = Appended(request, self.tokens)
            if self._limits.fits(appended.request):
                self._remainder = appended
        return self._remainder.request

    def new(self, chunk: TokenChunk) -> TokenChunk | None:
        """The part of a chunk that the client does not have; None without one. Raises EngineError, as `Replayed`."""
        assert self._remainder is not None, "no attempt has begun"
        new = (
            chunk if self._remainder.passes and chunk.completion_usage is None else self._remainder.new(chunk)
        )
        if new is not None:
            self.tokens += new.token_ids
        return new
