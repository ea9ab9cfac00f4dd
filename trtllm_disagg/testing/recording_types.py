"""The data types of `recording_llm`: TensorRT-LLM's names, fields and defaults.

Written apart from the embedded engine's on purpose: a field that only one of the two has shows up in a test.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

DEFAULT_REQUEST_PRIORITY = 0.5
_REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")
_FIRST_GLOBAL_ID = 1 << 40
#: Never made by `scripted_token`; put it into a script to end an answer.
EOS_TOKEN = 2


class RequestError(RuntimeError):
    """This request failed; the engine goes on."""


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        chosen = [item.name for item in fields(self) if getattr(self, item.name)]
        if len(chosen) > 1:
            raise ValueError(f"only one of these can be set: {', '.join(chosen)}")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    max_tokens: int = 32
    min_tokens: int | None = None
    end_id: int | None = None
    pad_id: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_p_decay: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    embedding_bias: Any = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False

    def __post_init__(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: Any = None
    schedule_style: DisaggScheduleStyle | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None
    multimodal_item_runs: list[Any] | None = None

    def __post_init__(self) -> None:
        if self.request_type is None:
            return
        self.request_type = self.request_type.lower()
        if self.request_type not in _REQUEST_TYPES:
            raise ValueError(f"Unknown request type: {self.request_type}. Must be one of {_REQUEST_TYPES}")


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice; its lists are cumulative, and grow between two iterations of the result."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: Any = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """As much of a tokenizer as a worker of token ids looks at."""

    bos_token_id: int = 1
    eos_token_id: int = EOS_TOKEN

    @property
    def tokenizer(self) -> Tokenizer:
        """TensorRT-LLM wraps the tokenizer of transformers; here both are one."""
        return self


_id_counter = itertools.count()


def get_global_disagg_request_id(node_id: int, process_id: int = 0) -> int:
    """An id that is unique and, unlike TensorRT-LLM's, does not depend on the clock."""
    if not 0 <= node_id < 256:
        raise ValueError(f"node_id must be in [0, 256), got {node_id}")
    if not 0 <= process_id < 64:
        raise ValueError(f"process_id must be in [0, 64), got {process_id}")
    return _FIRST_GLOBAL_ID + (next(_id_counter) << 14 | node_id << 6 | process_id)
