"""Turns arguments of generate_async into a validated AddRequest, before the engine sees the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trtllm_disagg.engines.embedded.api import images
from trtllm_disagg.engines.embedded.api.result import Logprob
from trtllm_disagg.engines.embedded.ipc.messages import (
    AddRequest,
    LogprobEntry,
    Ready,
    ReceivedHandoff,
    Rendezvous,
    SamplingSpec,
)
from trtllm_disagg.engines.embedded.params.request_params import (
    DisaggregatedParams,
    DisaggScheduleStyle,
    SamplingParams,
    validate_sampling_params,
)
from trtllm_disagg.wire.kv_handle import EXPECTED, is_endpoint

Tokenize = Callable[[str], list[int]]

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(AddRequest)

#: Refused by name, never ignored.
_UNSERVED_PARAMS = (
    "multimodal_embedding_handles",
    "mrope_position_ids_handle",
    "mrope_position_deltas_handle",
)


@dataclass
class PreprocessedInputs:
    """A prompt that needs no tokenizer: list or array of ints."""

    prompt_token_ids: Any


def prompt_of(inputs: Any, tokenize: Tokenize) -> tuple[str | None, list[int]]:
    """(text or None, token ids). Raises TypeError for forms that TensorRT-LLM does not take."""
    if isinstance(inputs, PreprocessedInputs):
        inputs = inputs.prompt_token_ids
    text = None
    if isinstance(inputs, dict):
        known = {"prompt", "prompt_token_ids", *images.INPUTS}
        if others := [key for key in inputs.keys() - known if inputs[key] is not None]:
            raise NotImplementedError(f"the embedded engine serves no inputs with {', '.join(others)}")
        text, token_ids = inputs.get("prompt"), inputs.get("prompt_token_ids")
        inputs = text if token_ids is None else token_ids
    if isinstance(inputs, str):
        return inputs, tokenize(inputs)
    # The usual case, kept fast for long prompts.
    if type(inputs) is list and set(map(type, inputs)) == {int}:
        return text, inputs.copy()
    if _is_token_ids(inputs):
        return text, [int(t) for t in inputs]
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")


def _is_token_ids(inputs: Any) -> bool:
    # numpy's int32 arrays have no common base class with list.
    return (isinstance(inputs, list) and all(isinstance(t, int) for t in inputs)) or (
        hasattr(inputs, "tolist") and getattr(getattr(inputs, "dtype", None), "kind", "") in "iu"
    )


def check_prompt(prompt: Sequence[int], ready: Ready) -> None:
    """Raises ValueError naming what is wrong and what is allowed."""
    if not prompt:
        raise ValueError("the prompt is empty; at least one token is needed")
    if len(prompt) >= ready.max_seq_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; max_seq_len {ready.max_seq_len} leaves room for at most "
            f"{ready.max_seq_len - 1}"
        )
    if min(prompt) < 0 or max(prompt) >= ready.vocab_size:
        raise ValueError(f"the prompt holds token ids outside [0, {ready.vocab_size})")


def as_received(request: AddRequest) -> AddRequest:
    """The request, without its prompt and images, as the engine core decodes it. Raises ValueError for a value of a
    wrong type.
    """
    try:
        return _requests.decode(_encoder.encode(request))
    except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"the request has a value of the wrong type: {error}") from None


def check_fits_a_step(prompt: Sequence[int], max_num_tokens: int) -> None:
    """Raises ValueError for a prompt longer than one step's tokens."""
    if len(prompt) > max_num_tokens:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; without enable_chunked_prefill, "
            f"at most max_num_tokens {max_num_tokens} are allowed"
        )


def request_type_of(params: DisaggregatedParams | None, can_transfer: bool) -> str:
    """Raises ValueError for a phase without a configured transport, NotImplementedError for unserved fields."""
    for name in _UNSERVED_PARAMS if params is not None else ():
        if getattr(params, name):
            raise NotImplementedError(f"DisaggregatedParams.{name} is not served by the embedded engine")
    kind = (params.request_type if params is not None else None) or "context_and_generation"
    if kind != "context_and_generation" and not can_transfer:
        raise ValueError(f"request type {kind} needs cache_transceiver_config.backend, which is not set")
    return kind


def other_half(
    params: DisaggregatedParams | None, kind: str, ready: Ready
) -> tuple[ReceivedHandoff | None, Rendezvous | None]:
    """What links the request to its other phase: one of the two, or neither. Raises ValueError."""
    if params is None or kind == "context_and_generation":
        return None, None
    if params.schedule_style == DisaggScheduleStyle.GENERATION_FIRST:
        return None, _rendezvous_of(params, kind)
    return (handoff_of(params, ready) if kind == "generation_only" else None), None


def check_serves_images(spec: SamplingSpec, rendezvous: Rendezvous | None) -> None:
    """Raises NotImplementedError for what a prompt with images cannot have."""
    if spec.prompt_logprobs is not None:
        raise NotImplementedError("SamplingParams.prompt_logprobs is not served with images")
    if rendezvous is not None:
        # Decode would need the expanded prompt and the digests before prefill has computed them.
        raise NotImplementedError("schedule_style GENERATION_FIRST is not served with images")


def _rendezvous_of(params: DisaggregatedParams, kind: str) -> Rendezvous:
    request = params.disagg_request_id
    if type(request) is not int or not 0 <= request < 1 << 63:
        raise ValueError(
            f"schedule_style GENERATION_FIRST needs disagg_request_id in [0, 2^63), got {request!r}"
        )
    if kind == "context_only":
        return Rendezvous(request)
    given = params.ctx_info_endpoint
    endpoints = [given] if isinstance(given, str) else list(given or ())
    if len(endpoints) != 1 or not is_endpoint(endpoints[0]):
        raise ValueError(
            f"schedule_style GENERATION_FIRST needs one ctx_info_endpoint, {EXPECTED}, got {given!r}"
        )
    return Rendezvous(request, endpoints[0])


def handoff_of(params: DisaggregatedParams, ready: Ready) -> ReceivedHandoff:
    """Raises ValueError for an incomplete handoff in a generation_only request."""
    if not params.opaque_state or not params.first_gen_tokens or len(params.first_gen_tokens) != 1:
        raise ValueError("a generation_only request needs opaque_state and exactly one of first_gen_tokens")
    first = params.first_gen_tokens[0]
    if type(first) is not int or not 0 <= first < ready.vocab_size:
        raise ValueError(f"first_gen_tokens holds {first!r}; expected a token id in [0, {ready.vocab_size})")
    logprobs = params.first_gen_log_probs
    return ReceivedHandoff(
        bytes(params.opaque_state), [first], [_logprob_entry(logprobs[0], first)] if logprobs else None
    )


def _logprob_entry(given: Any, chosen: int) -> LogprobEntry:
    """Turns {token id: Logprob} of the wire into an entry with the chosen token first."""
    if (
        not given
        or not isinstance(given, dict)
        or not all(isinstance(logprob, Logprob) for logprob in given.values())
    ):
        raise ValueError(f"first_gen_log_probs holds {given!r}; expected a dict of token id to Logprob")
    entry = [(token, logprob.logprob, logprob.rank or 0) for token, logprob in given.items()]
    return sorted(entry, key=lambda each: each[0] != chosen)


def sampling_spec(
    params: SamplingParams,
    *,
    num_prompt: int,
    request_type: str,
    ready: Ready,
    end_ids: Sequence[int],
    tokenize: Tokenize,
    guided_backend: str | None,
) -> SamplingSpec:
    """Resolves every default; `end_ids` apply unless the request names its own.

    Raises ValueError or NotImplementedError naming the field.
    """
    validate_sampling_params(params, ready.vocab_size)
    room = ready.max_seq_len - num_prompt
    max_tokens = 1 if request_type == "context_only" else params.max_tokens or room
    words = [] if params.ignore_eos else _stop_words(params, tokenize)
    return SamplingSpec(
        max_tokens=min(max_tokens, room),
        min_tokens=params.min_tokens or 0,
        greedy=_is_greedy(params),
        temperature=params.temperature or 1.0,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
        prompt_ignore_length=max(0, params.prompt_ignore_length or 0),
        seed=None if params.seed is None else params.seed & (2**63 - 1),
        logprobs=params.logprobs,
        # A generation_only request does not compute its prompt.
        prompt_logprobs=None if request_type == "generation_only" else params.prompt_logprobs,
        end_ids=() if params.ignore_eos else _end_ids(params, end_ids),
        stop_words=tuple(tuple(ids) for ids, _ in words),
        stop_reasons=tuple(reason for _, reason in words),
        include_stop=params.include_stop_str_in_output,
        bad_token_ids=tuple(params.bad_token_ids or ()) + _bad_words(params, tokenize),
        grammar=_grammar(params, guided_backend),
    )


def _is_greedy(params: SamplingParams) -> bool:
    if params.temperature is None and params.top_p is None and params.top_k is None and not params.min_p:
        return True
    return params.temperature == 0 or params.top_p == 0 or params.top_k == 1 or params.min_p == 1


def _end_ids(params: SamplingParams, known: Sequence[int]) -> tuple[int, ...]:
    if params.end_id is not None:
        return () if params.end_id == -1 else (params.end_id,)
    return tuple(known)


def _stop_words(params: SamplingParams, tokenize: Tokenize) -> list[tuple[list[int], int | str]]:
    """Stop strings as token sequences, as TensorRT-LLM matches them, and stop token ids."""
    strings = [params.stop] if isinstance(params.stop, str) else params.stop or []
    words: list[tuple[list[int], int | str]] = [(tokenize(text), text) for text in strings if text]
    return words + [([token], token) for token in params.stop_token_ids or ()]


def _bad_words(params: SamplingParams, tokenize: Tokenize) -> tuple[int, ...]:
    given = [params.bad] if isinstance(params.bad, str) else params.bad or ()
    bad = [text for text in given if text]
    tokens = [tokenize(text) for text in bad]
    if long := [text for text, ids in zip(bad, tokens, strict=True) if len(ids) != 1]:
        raise NotImplementedError(f"SamplingParams.bad: {long[0]!r} is more than one token; not served")
    return tuple(ids[0] for ids in tokens)


def _grammar(params: SamplingParams, backend: str | None) -> str | None:
    if params.guided_decoding is None:
        return None
    if backend is None:
        raise ValueError(
            "SamplingParams.guided_decoding needs guided_decoding_backend, which is not set "
            "(a worker's --guided-decoding-backend llguidance)"
        )
    # Imported here: only guided requests need the library.
    from trtllm_disagg.engines.embedded.model.guided_decoding import grammar_of

    return grammar_of(params.guided_decoding)
