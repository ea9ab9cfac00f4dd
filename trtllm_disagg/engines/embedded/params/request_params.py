"""A request's parameters as in TensorRT-LLM's LLM API: for sampling, guided decoding, scheduling, disaggregation."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")
MIN_GLOBAL_ID = 1 << 40


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """At most one field may be set. `json` is a schema: text, a dict, or a pydantic model."""

    json: str | dict[str, Any] | Any | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        chosen = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(chosen) > 1:
            raise ValueError(f"Only one guided decoding option can be set, got {', '.join(chosen)}")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token. Without temperature, top_k and top_p: greedy, as in TensorRT-LLM.

    Each draw depends on `seed` and the token's position, so a request gives the same tokens in any batch, wherever its
    prefill ran.
    """

    end_id: int | None = None
    pad_id: int | None = None
    #: None: up to max_seq_len.
    max_tokens: int | None = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any | None = None
    logits_processor: Any | None = None
    apply_batched_logits_processor: bool = False

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_simple_format: bool = False
    prompt_logprobs_simple_format: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[str] | None = None
    guided_decoding: GuidedDecodingParams | None = None
    thinking_token_budget: int | None = None

    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()


#: Fields that the embedded engine does not serve: refused by name, never ignored.
_UNSERVED = (
    "embedding_bias",
    "logits_processor",
    "apply_batched_logits_processor",
    "use_beam_search",
    "top_p_min",
    "top_p_reset_ids",
    "top_p_decay",
    "beam_search_diversity_rate",
    "early_stopping",
    "no_repeat_ngram_size",
    "beam_width_array",
    "logprobs_simple_format",
    "prompt_logprobs_simple_format",
    "return_context_logits",
    "return_generation_logits",
    "return_encoder_output",
    "additional_model_outputs",
    "truncate_prompt_tokens",
)

_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("max_tokens", 1, 2**31, "between 1 and 2147483648"),
    ("min_tokens", 0, 2**31, "between 0 and 2147483648"),
    ("n", 1, 128, "between 1 and 128"),
    ("temperature", 0.0, 1e6, "between 0 and 1000000"),
    ("top_k", 0, 2**31, "between 0 and 2147483648"),
    ("top_p", 0.0, 1.0, "between 0 and 1"),
    ("min_p", 0.0, 1.0, "between 0 and 1"),
    ("repetition_penalty", 1e-6, 1e6, "between 0.000001 and 1000000"),
    ("presence_penalty", -1e3, 1e3, "between -1000 and 1000"),
    ("frequency_penalty", -1e3, 1e3, "between -1000 and 1000"),
    ("logprobs", 0, 64, "between 0 and 64"),
    ("prompt_logprobs", 0, 64, "between 0 and 64"),
)

#: Checked for every request.
_unserved = attrgetter(*_UNSERVED)
_ranged = attrgetter(*(name for name, *_ in _RANGES))


def validate_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError naming field, value and what is allowed; NotImplementedError for an unserved field."""
    if any(values := _unserved(params)):
        name = next(name for name, value in zip(_UNSERVED, values, strict=True) if value)
        raise NotImplementedError(f"SamplingParams.{name} is not served by the embedded engine")
    if params.thinking_token_budget is not None:  # 0 is a budget
        raise NotImplementedError(
            "SamplingParams.thinking_token_budget (max_thinking_tokens) is not served by the embedded engine"
        )
    if params.best_of is not None and params.best_of != params.n:
        raise NotImplementedError("SamplingParams.best_of other than n is not served by the embedded engine")
    for value, (name, low, high, allowed) in zip(_ranged(params), _RANGES, strict=True):
        if value is not None and not low <= value <= high:
            raise ValueError(f"SamplingParams.{name}={value!r} is not allowed; expected {allowed}")
    if params.end_id not in (None, -1):
        _check_token_ids("end_id", [params.end_id], vocab_size)
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("bad_token_ids", params.bad_token_ids)):
        _check_token_ids(name, ids or (), vocab_size)


def _check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"SamplingParams.{name} holds {token!r}; expected token ids in [0, {vocab_size})"
            )


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """Attention DP has one rank here, so there is nothing to choose."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


@dataclass
class ConversationParams:
    """Groups requests on attention-DP ranks; here there is one rank."""

    conversation_id: str | None = None


class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """The handoff from one phase to the other.

    `opaque_state`: which engine holds the KV, in which blocks. `first_gen_log_probs`: one dict (token id -> Logprob)
    for the first token. `multimodal_hashes`: eight signed 32-bit numbers per image, the digest of its content.
    """

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | list[str] | None = None
    schedule_style: DisaggScheduleStyle | None = None
    ctx_usage: dict[str, Any] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in REQUEST_TYPES:
                raise ValueError(
                    f"Unknown request type: {self.request_type}. Must be one of {', '.join(REQUEST_TYPES)}"
                )


def get_global_disagg_request_id(node_id: int, process_id: int = 0) -> int:
    """A unique request id: node (8 bits), process (6), and 49 random bits in place of TensorRT-LLM's clock and counter,
    since engines meet by it and no other program may guess it.

    Raises ValueError for a node_id outside [0, 256) or a process_id outside [0, 64).
    """
    if not 0 <= node_id < 1 << 8:
        raise ValueError(f"node_id must be in [0, 256), got {node_id}")
    if not 0 <= process_id < 1 << 6:
        raise ValueError(f"process_id must be in [0, 64), got {process_id}")
    number = secrets.randbelow(((1 << 39) - (1 << 17)) << 10)  # the sum stays below 2^63
    return (number >> 10 << 24 | node_id << 16 | process_id << 10 | number & 1023) + MIN_GLOBAL_ID
