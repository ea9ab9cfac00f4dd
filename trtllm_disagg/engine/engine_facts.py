"""What an engine can take, as its worker describes it to peers."""

from __future__ import annotations

import math
from typing import Any, Self

import msgspec

from trtllm_disagg.engine.rank_placement import num_ranks_of
from trtllm_disagg.types import GenerateRequest


class Described(msgspec.Struct, frozen=True):
    """A part of a worker's description; None: unknown."""

    @classmethod
    def described(cls, description: object) -> Self:
        """Read a description; all is unknown if it cannot be read, as another version's."""
        try:
            return msgspec.convert(description, cls)
        except msgspec.ValidationError:
            return cls()

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.to_builtins(self).items() if value is not None}


class EngineFacts(Described, frozen=True):
    """An unknown fact is None: then only the engine can refuse a request for it."""

    #: Tokens of prompt and answer.
    max_seq_len: int | None = None
    #: Tokens of the longest prompt, if the engine must prefill in one step.
    longest_step: int | None = None
    #: Whether it decodes with guides.
    has_guides: bool | None = None
    #: Requests per step of an attention-DP rank, and the number of ranks.
    max_batch_size: int | None = None
    num_ranks: int = 1

    @property
    def slots(self) -> int | None:
        """The number of requests that the engine runs at once."""
        return self.max_batch_size and self.max_batch_size * self.num_ranks

    @classmethod
    def of(cls, max_seq_len: int | None, engine_args: Any) -> EngineFacts:
        """`engine_args`: the LLM's; None: unknown."""
        if engine_args is None:
            return cls(max_seq_len)
        is_chunked = getattr(engine_args, "enable_chunked_prefill", True)
        longest_step = None if is_chunked else getattr(engine_args, "max_num_tokens", None) or None
        has_guides = getattr(engine_args, "guided_decoding_backend", None) is not None
        limit = getattr(engine_args, "max_batch_size", None)
        return cls(max_seq_len, longest_step, has_guides, limit, num_ranks_of(engine_args))

    def why_less_than(self, other: EngineFacts, prefills: bool) -> str | None:
        """Why this engine cannot replace another, or None. A frontend keeps one context length per model, so a longer
        one is no better than a shorter one.
        """
        if None not in (self.max_seq_len, other.max_seq_len) and self.max_seq_len != other.max_seq_len:
            return f"max_seq_len {other.max_seq_len}; here it is {self.max_seq_len}"
        longest = other.longest_step or other.max_seq_len or math.inf
        step = self.longest_step
        if prefills and step is not None and step < longest:
            return f"longer prompts; max_num_tokens is {step} here, without enable_chunked_prefill"
        if other.has_guides and self.has_guides is False:
            return "guided answers; guided_decoding_backend is not set here"
        return None

    def why_unfit(self, request: GenerateRequest, *, computes_prompt: bool = True) -> str | None:
        """Why this engine refuses the request, or None. `computes_prompt`: false for a decode with fetched KV."""
        count = request.num_prompt
        if self.max_seq_len is not None and count >= self.max_seq_len:
            limit = self.max_seq_len - 1
            return f"the prompt has {count} tokens; max_seq_len {self.max_seq_len} leaves room for at most {limit}"
        if computes_prompt and self.longest_step is not None and count > self.longest_step:
            return (
                f"the prompt has {count} tokens, and max_num_tokens is {self.longest_step}; longer prompts need "
                "enable_chunked_prefill"
            )
        if self.has_guides is False and request.sampling.is_guided:
            # TensorRT-LLM would ignore the guide.
            flag = "a worker's --guided-decoding-backend"
            return f"guided decoding needs guided_decoding_backend, which is not set ({flag})"
        return None

    def room(self, request: GenerateRequest) -> int | None:
        """The number of tokens at which an answer ends here; None: only the engine knows."""
        room = None if self.max_seq_len is None else self.max_seq_len - request.num_prompt
        return min(filter(None, (request.stop.max_tokens, room)), default=None)
