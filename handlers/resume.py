"""The rest of an answer, when whoever was giving it has failed: nothing is repeated, nothing is left out."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from trtllm_disagg.errors import EngineError
from trtllm_disagg.types import GenerateRequest, TokenChunk, Usage


class Rest(Protocol):
    """What is asked for, and what of its answer is new to the client."""

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

    For answers whose next token depends on the text so far, its position and the seed only (`depends_on_text_only`).
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
        self.request = replace(
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


def only_if_it_must(request: GenerateRequest) -> bool:
    """For all others: what can be appended is."""
    return not depends_on_text_only(request)


def rest_of(request: GenerateRequest, delivered: list[int], replays: Replays = only_if_it_must) -> Rest:
    if not delivered:
        return Everything(request)
    return (Replayed if replays(request) else Appended)(request, delivered)


def depends_on_text_only(request: GenerateRequest) -> bool:
    """Prompt and answer may be one text to the sampler."""
    sampling = request.sampling
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    return not any(penalties) and sampling.repetition_penalty in (None, 1.0) and not sampling.guided_decoding


def repeatable(request: GenerateRequest) -> GenerateRequest:
    """An answer that may have to be given twice needs a seed, or it would be another one."""
    sampling = request.sampling
    if sampling.seed is not None:
        return request
    seed = {"seed": secrets.randbits(31) or 1}
    raw_sampling = dict(request.raw.get("sampling_options") or {}) | seed
    return replace(
        request,
        raw=request.raw | {"sampling_options": raw_sampling},
        sampling=msgspec.structs.replace(sampling, **seed),
    )


def has_ended(request: GenerateRequest, delivered: list[int]) -> bool:
    """The client has the last token; only the end itself was lost."""
    limit = request.stop.max_tokens
    return limit is not None and len(delivered) >= limit


def the_end(request: GenerateRequest, delivered: list[int]) -> TokenChunk:
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
