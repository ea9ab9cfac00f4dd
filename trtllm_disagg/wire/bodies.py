"""Request and answer bodies between processes, dict <-> types (the handoff in them: `handoff_formats.py`)."""

from __future__ import annotations

import base64
import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from trtllm_disagg.errors import HandoffRefusedError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.types import (
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
from trtllm_disagg.wire.migration_link import before_migration, length_of_prompt

# Guides of a request (`guided_json` and its like, as Dynamo's frontend forwards them).


class _Guide(NamedTuple):
    accepts: Callable[[Any], bool]
    allowed: str


def require_guides(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError, naming the field, for a guide that is empty or of the wrong type: without the guide
    the answer could be any text. None means no guide, and so does an empty list of choices beside another guide: the
    frontend takes it for none, drops it where it is alone, and forwards it otherwise.
    """
    told = {name: given[name] for name in _GUIDES if given.get(name) is not None}
    if told.get("json_object") is False:
        del told["json_object"]
    for name, value in told.items():
        if name == "choice" and value == [] and len(told) > 1:
            continue
        if not _GUIDES[name].accepts(value):
            raise InvalidRequestError(
                f"guided_{name}: {str(value)[:100]!r} is not allowed; expected {_GUIDES[name].allowed}"
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


#: By name in `sampling_options.guided_decoding`. An empty schema is a guide: any JSON.
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

#: Keys that routers add to disaggregated_params.
_FOREIGN_KEYS = ("worker_id", "_epd_metadata")

#: Keys that name the engine with the KV: TensorRT-LLM's C++ transceiver fills the first, its Python one the second.
_SENDER_KEYS = ("opaque_state", "ctx_info_endpoint")


def decode_request(
    raw: dict[str, Any], longest_prompt: float = math.inf, trace_headers: dict[str, str] | None = None
) -> GenerateRequest:
    """Raise InvalidRequestError, naming the key, for a request that no worker serves. `longest_prompt`: in tokens."""
    _require_length(raw, longest_prompt)
    require_text(raw)
    raw, migrated = before_migration(_with_token_list(raw))
    try:
        wire = msgspec.convert(_with_options_in_place(raw), WireRequest)
        if migrated is not None:
            msgspec.convert(migrated.delivered, list[TokenId])
    except msgspec.ValidationError as error:
        is_handoff = any(f"`{path}" in str(error) for path in HANDOFF_PATHS)
        refused = HandoffRefusedError if is_handoff else InvalidRequestError
        raise refused(f"request: {error}") from None
    given = given_in(wire)
    routing = wire.routing or _NO_ROUTING
    full = wire.phase_request.full if wire.phase_request is not None else None
    request = GenerateRequest(
        raw=raw,
        token_ids=wire.token_ids,
        stop=wire.stop_conditions or _NO_STOP,
        sampling=wire.sampling_options or _NO_SAMPLING,
        output=wire.output_options or _NO_OUTPUT,
        cache_salt=routing.cache_salt or _salt_of_extension(raw),
        priority=_of_engine(routing.priority) if wire.priority is None else wire.priority,
        annotations=tuple(wire.annotations or ()),
        prefill_result=given.prefill_result,
        rendezvous=given.rendezvous,
        phase_request=wire.phase_request,
        pins={"prefill": routing.prefill_worker_id, "decode": routing.decode_worker_id},
        # In a request from another worker the rank was chosen for that worker's engine.
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


#: Keys that Dynamo's frontend adds to a request with images, audio or video.
MEDIA_KEYS = (
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "multimodal_embedding_handles",
    "multi_modal_embeddings",
)


def require_text(raw: Any) -> None:
    """Raises InvalidRequestError for a request with media: an answer to its token ids alone would ignore the media."""
    if not isinstance(raw, dict):
        return
    named = next((key for key in MEDIA_KEYS if raw.get(key)), None) or _media_in_messages(raw)
    if named is not None:
        raise InvalidRequestError(
            f"{named}: this worker serves text; expected a request without images, audio or video"
        )


def _media_in_messages(raw: dict[str, Any]) -> str | None:
    """The path of a part that is not text in the messages, which the frontend forwards beside the tokens."""
    extra = raw.get("extra_args")
    messages = extra.get("messages") if isinstance(extra, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind.startswith(_MEDIA_PARTS):
                return f"extra_args.messages: {kind}"
    return None


#: `image_url`, `input_audio`, `video_url` and the like, as OpenAI's API has them.
_MEDIA_PARTS = ("image", "input_image", "audio", "input_audio", "video", "input_video")


def _require_length(raw: Any, longest: float) -> None:
    tokens = raw.get("token_ids") if isinstance(raw, dict) else None
    if isinstance(tokens, (list, bytes, bytearray, memoryview)):
        count = length_of_prompt(raw, len(tokens) if isinstance(tokens, list) else len(tokens) // 4)
        if count > longest:
            raise InvalidRequestError(
                f"the prompt has {count} tokens; max_seq_len {longest} leaves room for fewer"
            )


def _with_token_list(raw: Any) -> Any:
    """The request with a list of tokens: under DYN_TOKEN_IDS_AS_BYTES Dynamo packs them as little-endian int32."""
    packed = raw.get("token_ids") if isinstance(raw, dict) else None
    if not isinstance(packed, (bytes, bytearray, memoryview)):
        return raw
    if len(packed) % 4:
        raise InvalidRequestError(f"request: {len(packed)} bytes are no whole token ids - at `$.token_ids`")
    return raw | {"token_ids": list(struct.unpack(f"<{len(packed) // 4}i", packed))}


#: Options that Dynamo's worker reads at the top of a request, too -> where they belong.
_AT_THE_TOP = dict.fromkeys(("max_tokens", "min_tokens", "ignore_eos"), "stop_conditions")
_AT_THE_TOP["temperature"] = "sampling_options"


def _with_options_in_place(raw: Any) -> Any:
    """The request without options at its top. One that is in its place already wins."""
    if not isinstance(raw, dict) or _AT_THE_TOP.keys().isdisjoint(raw):
        return raw
    moved = dict(raw)
    for name, group in _AT_THE_TOP.items():
        if name in raw and isinstance(given := moved.get(group) or {}, dict):
            moved[group] = {name: moved.pop(name)} | given
    return moved


def _salt_of_extension(raw: dict[str, Any]) -> str | None:
    """`nvext.cache_salt`, which some frontends do not copy into `routing`."""
    extra = raw.get("extra_args")
    extension = extra.get("nvext") if isinstance(extra, dict) else None
    salt = extension.get("cache_salt") if isinstance(extension, dict) else None
    return salt if isinstance(salt, str) and salt else None


def _of_engine(priority: int | None) -> float | None:
    """TensorRT-LLM's priority, from 0 to 1, for any number: 0.5 for 0, and never 1, which is a health probe's."""
    return None if priority is None else 0.5 + 0.499 * priority / (1 + abs(priority))


def _session_of(raw: dict[str, Any]) -> str | None:
    context = raw.get("agent_context")
    session = context.get("session_id") if isinstance(context, dict) else None
    return (session.strip() or None) if isinstance(session, str) else None


def require_splittable(request: GenerateRequest, *, gets_prompt_logprobs: bool) -> None:
    """Raises InvalidRequestError for a request that needs what a handoff cannot carry: only an agg worker serves it.

    `gets_prompt_logprobs`: prefill's logprobs of the prompt reach the worker that answers the client.
    """
    if request.num_choices != 1:
        raise InvalidRequestError(
            f"n={request.num_choices}: a handoff carries one choice; expected n=1 of workers that share a request "
            "(send it several times, with different seeds, for several choices)"
        )
    if request.output.prompt_logprobs is not None and not gets_prompt_logprobs:
        # A worker cannot tell echo from prompt_logprobs.
        raise InvalidRequestError(
            "echo (or prompt_logprobs) is not served under the strategy router, nor with --schedule-style "
            "generation_first: what prefill computes of the prompt does not reach the answer; expected neither"
        )


#: As in OpenAI's API. Each choice costs this worker memory before an engine sees the request.
_MOST_CHOICES = 128


def _require_servable(request: GenerateRequest) -> None:
    """Raises InvalidRequestError for a request that no strategy serves, so that all workers refuse it alike."""
    n, best_of = request.sampling.n, request.sampling.best_of
    if n is not None and not 1 <= n <= _MOST_CHOICES:
        raise InvalidRequestError(f"n={n} is not allowed; expected 1 to {_MOST_CHOICES}")
    if best_of not in (None, request.num_choices):
        raise InvalidRequestError(
            f"best_of={best_of}: answers are sent as they are made, not compared; expected {request.num_choices}, as n"
        )
    if request.sampling.use_beam_search:
        raise InvalidRequestError("use_beam_search=true: KV transfer carries one beam; expected false")
    require_guides(request.sampling.guided_decoding or {})
    # 0 never comes from a client, but from a frontend whose worker died after the last token (handlers/delivered.py).
    if request.stop.max_tokens is not None and request.stop.max_tokens < 0:
        raise InvalidRequestError(f"max_tokens={request.stop.max_tokens} is not allowed; expected at least 1")


_PHASE_REQUEST = "errand"


def encode_request(request: GenerateRequest, phase_request: PhaseRequest, **replaced: Any) -> dict[str, Any]:
    """The body for another worker: the request as it came, but for keys that are `replaced`; what is asked of that
    worker; and the prefill result, under the key that Dynamo's router uses, or the rendezvous.
    """
    added = {
        "prefill_result": request.prefill_result,
        "rendezvous": request.rendezvous,
        _PHASE_REQUEST: phase_request,
        "traceparent": request.span.traceparent,
    }
    built = {name: msgspec.to_builtins(value) for name, value in added.items() if value is not None}
    return request.raw | built | replaced


def encode_notice(notice: PhaseRequest) -> dict[str, Any]:
    return {"token_ids": [], _PHASE_REQUEST: msgspec.to_builtins(notice)}


def kind_of(body: dict[str, Any]) -> str:
    """The kind of the phase request in a body for another worker."""
    return str(body[_PHASE_REQUEST]["stage"])


def decode_chunk(raw: Any) -> TokenChunk:
    try:
        return msgspec.convert(raw, TokenChunk)
    except msgspec.ValidationError as error:
        raise PeerUnavailableError(f"the other worker sent an unreadable answer: {error}") from None


def encode_chunk(chunk: TokenChunk) -> dict[str, Any]:
    encoded: dict[str, Any] = msgspec.to_builtins(chunk)
    return encoded


def encode_disaggregated_params(params: Any) -> dict[str, Any]:
    """A DisaggregatedParams dataclass of an engine -> JSON-safe dict, as Dynamo's own worker writes it."""
    # dataclasses.asdict would copy, and turn Logprob objects into dicts.
    names = (each.name for each in dataclasses.fields(params))
    encoded = {name: value for name in names if (value := getattr(params, name)) is not None}
    if "opaque_state" in encoded:
        encoded["opaque_state"] = base64.b64encode(encoded["opaque_state"]).decode()
    if "first_gen_log_probs" in encoded:
        encoded["first_gen_log_probs"] = [
            [{"token_id": int(t), "logprob": float(lp.logprob), "rank": lp.rank} for t, lp in entry.items()]
            if isinstance(entry, dict)
            else entry  # a plain number: the request asks for no alternatives
            for entry in encoded["first_gen_log_probs"]
        ]
    # Tensors, which a decode that has the token does not need.
    encoded.pop("first_gen_logits", None)
    return encoded


def names_a_sender(encoded: dict[str, Any]) -> bool:
    """Whether decode can find the KV."""
    return any(encoded.get(key) for key in _SENDER_KEYS)


class _LogProb(msgspec.Struct, frozen=True):
    token_id: int
    #: None stands for minus infinity, which a guide gives to tokens that it forbids: JSON has no such number.
    logprob: float | None
    rank: int | None

    @property
    def number(self) -> float:
        return -math.inf if self.logprob is None else self.logprob


class _EngineParams(msgspec.Struct, frozen=True):
    """The fields of a handoff that an engine reads. A wrong type can end its process: TensorRT-LLM passes them on to
    C++ where nothing catches the error, and an engine calls bytes(opaque_state), which of a number makes so many zeros.
    """

    opaque_state: bytes | None = None
    ctx_info_endpoint: str | list[str] | None = None
    ctx_request_id: Number63 | None = None
    disagg_request_id: Number63 | None = None
    ctx_dp_rank: Int32 | None = None
    first_gen_tokens: list[Int32] | None = None
    draft_tokens: list[Int32] | None = None
    #: For each token its alternatives; a plain number where the request asks for none.
    first_gen_log_probs: list[list[_LogProb] | float] | None = None

    def __post_init__(self) -> None:
        if self.ctx_info_endpoint is not None:
            msgspec.structs.force_setattr(self, "ctx_info_endpoint", one_endpoint(self.ctx_info_endpoint))
        if self.ctx_info_endpoint and self.ctx_request_id is None:
            # TensorRT-LLM asserts it in the loop of its Python transceiver (native/transfer.py).
            raise ValueError("ctx_info_endpoint without ctx_request_id")


def require_readable(result: PrefillResult) -> None:
    """Raises HandoffRefusedError for a handoff with fields that no engine can read, without a sender or a token."""
    _read(result)


def _read(result: PrefillResult) -> _EngineParams:
    if not names_a_sender(result.disaggregated_params):
        raise HandoffRefusedError(f"handoff names no sender: it has neither {' nor '.join(_SENDER_KEYS)}")
    try:
        read = msgspec.convert(result.disaggregated_params, _EngineParams)
    except (msgspec.ValidationError, ValueError) as error:
        raise HandoffRefusedError(f"handoff is not readable: {error}") from None
    if not read.first_gen_tokens:
        # TensorRT-LLM's loop takes the first one, and would end with an IndexError.
        raise HandoffRefusedError("handoff is not readable: first_gen_tokens has no token")
    return read


def decode_disaggregated_params(result: PrefillResult, params_class: Any, logprob_class: Any) -> Any:
    """The handoff as a generation_only `params_class` of the engine. Raises HandoffRefusedError."""
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
