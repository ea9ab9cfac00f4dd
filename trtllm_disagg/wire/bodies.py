"""Converts request and answer bodies between dicts and types (handoffs: `handoff_formats.py`)."""

from __future__ import annotations

import base64
import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from trtllm_disagg.errors import HandoffRefusedError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.types import (
    CHOICES,
    GenerateRequest,
    Int32,
    Number63,
    OutputOptions,
    PhaseRequest,
    PrefillResult,
    Routing,
    SamplingOptions,
    StopConditions,
    TokenChunk,
    TokenId,
    WireRequest,
    one_endpoint,
)
from trtllm_disagg.wire.handoff_formats import HANDOFF_PATHS, given_in
from trtllm_disagg.wire.images import PREFILL_PROMPT, images_in
from trtllm_disagg.wire.migration_link import before_migration, length_of_prompt
from trtllm_disagg.wire.old_names import PHASE_REQUEST, as_in_02, with_phase_request

# A request's guides (`guided_json` etc., as Dynamo's frontend forwards them).


class _Guide(NamedTuple):
    accepts: Callable[[Any], bool]
    allowed: str


def require_guides(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError, naming the field, for a guide that is empty, of the wrong type, or beside another,
    since an unguided answer could be any text. None means no guide. So does an empty list of choices beside another
    guide: the frontend ignores it, but forwards it in that case.
    """
    chosen = {name: given[name] for name in _GUIDES if given.get(name) is not None}
    if chosen.get("json_object") is False:
        del chosen["json_object"]
    for name, value in chosen.items():
        if name == "choice" and value == [] and len(chosen) > 1:
            continue
        if not _GUIDES[name].accepts(value):
            raise InvalidRequestError(
                f"guided_{name}: {str(value)[:100]!r} is not allowed; expected {_GUIDES[name].allowed}"
            )
    guides = [f"guided_{name}" for name, value in chosen.items() if value != []]
    if len(guides) > 1:  # TensorRT-LLM does not count an empty schema, and drops the other guide
        raise InvalidRequestError(f"{', '.join(guides)}: {len(guides)} guides; expected one")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


#: By name in `sampling_options.guided_decoding`. An empty schema is a guide for any JSON.
_GUIDES = {
    "json": _Guide(
        lambda value: isinstance(value, dict) or value is True or _is_text(value), "a JSON schema"
    ),
    "regex": _Guide(_is_text, "a regular expression that is not empty"),
    "grammar": _Guide(_is_text, "a grammar that is not empty"),
    "choice": _Guide(
        lambda value: (
            isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
        ),
        "a list of texts, at least one",
    ),
    "json_object": _Guide(lambda value: isinstance(value, bool), "true or false"),
    "structural_tag": _Guide(
        lambda value: (isinstance(value, dict) and bool(value)) or _is_text(value), "an object"
    ),
}


_NO_STOP, _NO_SAMPLING = StopConditions(), SamplingOptions()
_NO_OUTPUT, _NO_ROUTING = OutputOptions(), Routing()

#: Keys in disaggregated_params that are not for engines: of routers, of prompts with images, of further choices.
_FOREIGN_KEYS = ("worker_id", PREFILL_PROMPT, CHOICES)

#: Keys that name the engine with the KV: TensorRT-LLM's C++ transceiver sets the first, its Python one the second.
_SENDER_KEYS = ("opaque_state", "ctx_info_endpoint")


def decode_request(
    raw: dict[str, Any],
    longest_prompt: float = math.inf,
    trace_headers: dict[str, str] | None = None,
    *,
    takes_images: bool = False,
) -> GenerateRequest:
    """Raises InvalidRequestError, naming the key, for a request that no worker serves, or with images unless this one
    `takes_images`. `longest_prompt`: in tokens.
    """
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"request: expected an object, got {type(raw).__name__}")
    raw, migrated = before_migration(_with_token_list(raw, longest_prompt))
    try:
        wire = msgspec.convert(_with_options_in_place(with_phase_request(raw)), WireRequest)
        if migrated is not None:
            msgspec.convert(migrated.delivered, list[TokenId])
    except msgspec.ValidationError as error:
        is_handoff = any(f"`{path}" in str(error) for path in HANDOFF_PATHS)
        refused = HandoffRefusedError if is_handoff else InvalidRequestError
        raise refused(f"request: {error}") from None
    given = given_in(wire)
    raw, sampling = _with_draws(raw, wire.sampling_options or _NO_SAMPLING)
    routing = wire.routing or _NO_ROUTING
    full = wire.phase_request.full if wire.phase_request is not None else None
    request = GenerateRequest(
        raw=raw,
        token_ids=wire.token_ids,
        stop=wire.stop_conditions or _NO_STOP,
        sampling=sampling,
        output=wire.output_options or _NO_OUTPUT,
        cache_salt=routing.cache_salt or _salt_of_extension(raw),
        priority=_of_engine(routing.priority) if wire.priority is None else wire.priority,
        annotations=tuple(wire.annotations or ()),
        prefill_result=given.prefill_result,
        images=images_in(raw, takes_images=takes_images),
        rendezvous=given.rendezvous,
        phase_request=wire.phase_request,
        pins={"prefill": routing.prefill_worker_id, "decode": routing.decode_worker_id},
        # Another worker's request has the rank of that worker's engine.
        dp_rank=routing.dp_rank if wire.phase_request is None else None,
        session_id=_session_of(raw),
        trace_headers=trace_headers,
        traceparent=wire.traceparent,
        decode_follows=given.decode_follows,
        skipped=frozenset() if full is None else frozenset({full}),
        migrated=migrated,
    )
    _require_servable(request)
    return request


def _with_token_list(raw: dict[str, Any], longest: float) -> dict[str, Any]:
    """The request with a list of tokens: under DYN_TOKEN_IDS_AS_BYTES Dynamo packs them as little-endian int32. Raises
    InvalidRequestError for more than `longest` tokens, before unpacking.
    """
    tokens: Any = raw.get("token_ids")
    is_packed = not isinstance(tokens, list)
    if is_packed and not isinstance(tokens, (bytes, bytearray, memoryview)):
        return raw
    count = length_of_prompt(raw, len(tokens) // 4 if is_packed else len(tokens))
    if count > longest:
        raise InvalidRequestError(
            f"the prompt has {count} tokens; max_seq_len {longest} leaves room for fewer"
        )
    if not is_packed:
        return raw
    if len(tokens) % 4:
        raise InvalidRequestError(f"request: {len(tokens)} bytes, no multiple of 4 - at `$.token_ids`")
    return raw | {"token_ids": list(struct.unpack(f"<{len(tokens) // 4}i", tokens))}


#: Options that Dynamo's worker also reads at a request's top level -> their group.
_AT_THE_TOP = dict.fromkeys(("max_tokens", "min_tokens", "ignore_eos"), "stop_conditions")
_AT_THE_TOP["temperature"] = "sampling_options"
_NAMES_AT_THE_TOP = _AT_THE_TOP.keys()


def _with_options_in_place(raw: dict[str, Any]) -> dict[str, Any]:
    """The request with top-level options moved to their groups. Options already there win."""
    if _NAMES_AT_THE_TOP.isdisjoint(raw):
        return raw
    moved = dict(raw)
    for name, group in _AT_THE_TOP.items():
        if name in raw and isinstance(given := moved.get(group) or {}, dict):
            moved[group] = {name: moved.pop(name)} | given
    return moved


def _with_draws(raw: dict[str, Any], sampling: SamplingOptions) -> tuple[dict[str, Any], SamplingOptions]:
    """Draw several choices without sampling options at OpenAI's default temperature: TensorRT-LLM refuses greedy ones,
    which would be equal. One choice is greedy, as in TensorRT-LLM.
    """
    if (sampling.n or 1) == 1 or (sampling.temperature, sampling.top_p, sampling.top_k) != (None,) * 3:
        return raw, sampling
    drawn = dict(raw["sampling_options"]) | {"temperature": 1.0}
    return raw | {"sampling_options": drawn}, msgspec.structs.replace(sampling, temperature=1.0)


def _salt_of_extension(raw: dict[str, Any]) -> str | None:
    """`nvext.cache_salt`: some frontends do not copy it into `routing`."""
    if not isinstance(extra := raw.get("extra_args"), dict):
        return None
    extension = extra.get("nvext")
    salt = extension.get("cache_salt") if isinstance(extension, dict) else None
    return salt if isinstance(salt, str) and salt else None


def _of_engine(priority: int | None) -> float | None:
    """Maps any number to TensorRT-LLM's priority, 0 to 1: 0 becomes 0.5; 1 is kept for health probes."""
    return None if priority is None else 0.5 + 0.499 * priority / (1 + abs(priority))


def _session_of(raw: dict[str, Any]) -> str | None:
    if not isinstance(context := raw.get("agent_context"), dict):
        return None
    session = context.get("session_id")
    return (session.strip() or None) if isinstance(session, str) else None


def require_splittable(request: GenerateRequest, *, gets_prompt_logprobs: bool) -> None:
    """Raises InvalidRequestError for a request that only agg workers serve, since a handoff cannot carry what it needs.

    `gets_prompt_logprobs`: the worker that answers the client gets prefill's logprobs of the prompt.
    """
    if request.output.prompt_logprobs is not None and not gets_prompt_logprobs:
        # A worker cannot tell echo from prompt_logprobs.
        raise InvalidRequestError(
            "echo (or prompt_logprobs) is not served under the strategy router, nor with --schedule-style "
            "generation_first: what prefill computes of the prompt does not reach the answer; expected neither"
        )


#: OpenAI's limit: each choice costs this worker memory before an engine sees the request.
_MAX_CHOICES = 128


def _require_servable(request: GenerateRequest) -> None:
    """Raises InvalidRequestError for a request that no strategy serves."""
    if not request.token_ids and (request.phase_request is None or not request.phase_request.is_notice):
        raise InvalidRequestError("the prompt is empty; expected at least one token")
    n, best_of = request.sampling.n, request.sampling.best_of
    if n is not None and not 1 <= n <= _MAX_CHOICES:
        raise InvalidRequestError(f"n={n} is not allowed; expected 1 to {_MAX_CHOICES}")
    if best_of is not None and best_of != request.num_choices:
        raise InvalidRequestError(
            f"best_of={best_of}: answers are sent as they are made, not compared; expected {request.num_choices}, as n"
        )
    if request.sampling.use_beam_search:
        raise InvalidRequestError("use_beam_search=true: KV transfer carries one beam; expected false")
    if request.images is not None and request.output.prompt_logprobs is not None:
        raise InvalidRequestError("echo (or prompt_logprobs) with images is not served; expected one of them")
    if request.sampling.guided_decoding:
        require_guides(request.sampling.guided_decoding)
    # 0 comes only from a frontend after its worker died behind the last token (handlers/delivered.py).
    if request.stop.max_tokens is not None and request.stop.max_tokens < 0:
        raise InvalidRequestError(f"max_tokens={request.stop.max_tokens} is not allowed; expected at least 1")


def encode_request(request: GenerateRequest, phase_request: PhaseRequest, **replaced: Any) -> dict[str, Any]:
    """The body for another worker: the request as it came, except `replaced` keys; the phase request; and the prefill
    result, under Dynamo's router's key, or the rendezvous.
    """
    added = {
        "prefill_result": request.prefill_result,
        "rendezvous": request.rendezvous,
        "traceparent": request.span.traceparent,
    }
    built = {name: msgspec.to_builtins(value) for name, value in added.items() if value is not None}
    return request.raw | built | _encoded(phase_request) | replaced


def encode_notice(notice: PhaseRequest) -> dict[str, Any]:
    return {"token_ids": []} | _encoded(notice)


def _encoded(phase_request: PhaseRequest) -> dict[str, Any]:
    encoded = msgspec.to_builtins(phase_request)
    return {"phase_request": encoded, PHASE_REQUEST: as_in_02(encoded)}


def phase_of(body: dict[str, Any]) -> str:
    """The phase requested by a body for another worker."""
    return str(body["phase_request"]["phase"])


def decode_chunk(raw: Any) -> TokenChunk:
    try:
        return msgspec.convert(raw, TokenChunk)
    except msgspec.ValidationError as error:
        raise PeerUnavailableError(f"the other worker sent an unreadable answer: {error}") from None


def encode_chunk(chunk: TokenChunk) -> dict[str, Any]:
    encoded: dict[str, Any] = msgspec.to_builtins(chunk)
    return encoded


def encode_disaggregated_params(params: Any) -> dict[str, Any]:
    """An engine's DisaggregatedParams as a JSON-safe dict, like Dynamo's own worker's."""
    # dataclasses.asdict would copy, and convert Logprob objects.
    names = [each.name for each in dataclasses.fields(params)]
    values = zip(names, attrgetter(*names)(params), strict=True)
    encoded = {name: value for name, value in values if value is not None}
    if "opaque_state" in encoded:
        encoded["opaque_state"] = base64.b64encode(encoded["opaque_state"]).decode()
    if "first_gen_log_probs" in encoded:
        encoded["first_gen_log_probs"] = [
            [{"token_id": int(t), "logprob": float(lp.logprob), "rank": lp.rank} for t, lp in entry.items()]
            if isinstance(entry, dict)
            else entry  # a number: the request asks for no alternatives
            for entry in encoded["first_gen_log_probs"]
        ]
    # Tensors that a decode with the token does not need.
    encoded.pop("first_gen_logits", None)
    return encoded


def names_a_sender(encoded: dict[str, Any]) -> bool:
    """Whether the handoff says where the KV is."""
    return bool(encoded.get("opaque_state") or encoded.get("ctx_info_endpoint"))


class _LogProb(msgspec.Struct, frozen=True):
    token_id: int
    #: None: minus infinity, for tokens that a guide forbids, which JSON lacks.
    logprob: float | None
    rank: int | None

    @property
    def number(self) -> float:
        return -math.inf if self.logprob is None else self.logprob


class _EngineParams(msgspec.Struct, frozen=True):
    """The handoff fields that engines read. A wrong type can end the engine: TensorRT-LLM passes them to C++ without
    catching errors, and bytes(opaque_state) of a number allocates that number of zeros.
    """

    opaque_state: bytes | None = None
    ctx_info_endpoint: str | list[str] | None = None
    ctx_request_id: Number63 | None = None
    disagg_request_id: Number63 | None = None
    ctx_dp_rank: Int32 | None = None
    first_gen_tokens: list[Int32] | None = None
    draft_tokens: list[Int32] | None = None
    #: Each token's alternatives; a number if the request asks for none.
    first_gen_log_probs: list[list[_LogProb] | float] | None = None
    #: Of each image's content: 8 numbers.
    multimodal_hashes: list[list[Int32]] | None = None

    def __post_init__(self) -> None:
        if self.ctx_info_endpoint is not None:
            msgspec.structs.force_setattr(self, "ctx_info_endpoint", one_endpoint(self.ctx_info_endpoint))
        if self.ctx_info_endpoint and self.ctx_request_id is None:
            # TensorRT-LLM's Python transceiver asserts it in its loop (native/transfer.py).
            raise ValueError("ctx_info_endpoint without ctx_request_id")


def require_readable(result: PrefillResult) -> None:
    """Raises HandoffRefusedError for a handoff with unreadable fields, without a sender or without a token."""
    _read(result)


def _read(result: PrefillResult) -> _EngineParams:
    if not names_a_sender(result.disaggregated_params):
        raise HandoffRefusedError(f"handoff names no sender: it has neither {' nor '.join(_SENDER_KEYS)}")
    try:
        read = msgspec.convert(result.disaggregated_params, _EngineParams)
    except (msgspec.ValidationError, ValueError) as error:
        raise HandoffRefusedError(f"handoff is not readable: {error}") from None
    if not read.first_gen_tokens:
        # TensorRT-LLM's loop would end with an IndexError.
        raise HandoffRefusedError("handoff is not readable: first_gen_tokens has no token")
    return read


def decode_disaggregated_params(result: PrefillResult, params_class: Any, logprob_class: Any) -> Any:
    """The handoff as the engine's generation_only `params_class`. Raises HandoffRefusedError."""
    read = _read(result)
    given = {key: value for key, value in result.disaggregated_params.items() if key not in _FOREIGN_KEYS}
    try:
        given |= {name: getattr(read, name) for name in given.keys() & set(_EngineParams.__struct_fields__)}
        if read.first_gen_log_probs is not None:
            given["first_gen_log_probs"] = [
                {each.token_id: logprob_class(logprob=each.number, rank=each.rank) for each in entry}
                if isinstance(entry, list)
                else entry
                for entry in read.first_gen_log_probs
            ]
        return params_class(**(given | {"request_type": "generation_only"}))
    except (TypeError, ValueError) as error:
        raise HandoffRefusedError(f"handoff is not readable: {error}") from None
