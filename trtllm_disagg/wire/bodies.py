"""dict <-> types: the only module that knows how a request looks between processes."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from trtllm_disagg.errors import HandoffRefusedError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.types import (
    GenerateRequest,
    OutputOptions,
    PhaseRequest,
    PrefillResult,
    Routing,
    SamplingOptions,
    StopConditions,
    TokenChunk,
    WireRequest,
)
from trtllm_disagg.wire.handoff_formats import HANDOFF_PATHS, given_in

# Which guides of a request can guide: `guided_json` and its like, as Dynamo's frontend forwards them.


class _Guide(NamedTuple):
    accepts: Callable[[Any], bool]
    allowed: str


def require_guides(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError, naming the field, for a guide that is empty or of the wrong type: to leave it out
    would answer with any text. None is no guide. An empty list of choices never comes here: the frontend drops it.
    """
    for name, guide in _GUIDES.items():
        value = given.get(name)
        if value is not None and not guide.accepts(value):
            raise InvalidRequestError(
                f"guided_{name}: {str(value)[:100]!r} is not allowed; expected {guide.allowed}"
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


#: By name in `sampling_options.guided_decoding`. An empty schema is one: any JSON.
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


_NO_STOP, _NO_SAMPLING, _NO_OUTPUT, _NO_ROUTING = (
    StopConditions(),
    SamplingOptions(),
    OutputOptions(),
    Routing(),
)

#: Keys that routers add to the parameters on their way.
_FOREIGN_KEYS = ("worker_id", "_epd_metadata")

#: The holder of the KV: TensorRT-LLM's C++ transceiver fills the first, its Python one the second.
_SENDER_KEYS = ("opaque_state", "ctx_info_endpoint")


def decode_request(
    raw: dict[str, Any], longest_prompt: float = math.inf, trace_headers: dict[str, str] | None = None
) -> GenerateRequest:
    """Raise InvalidRequestError naming the key that does not fit. A prompt of more than `longest_prompt` tokens is
    refused before anything looks at them.
    """
    _require_length(raw, longest_prompt)
    require_text(raw)
    raw = _with_token_list(raw)
    try:
        wire = msgspec.convert(raw, WireRequest)
    except msgspec.ValidationError as error:
        is_handoff = any(f"`{path}" in str(error) for path in HANDOFF_PATHS)
        refused = HandoffRefusedError if is_handoff else InvalidRequestError
        raise refused(f"request: {error}") from None
    given = given_in(wire)
    routing = wire.routing or _NO_ROUTING
    request = GenerateRequest(
        raw=raw,
        token_ids=wire.token_ids,
        stop=wire.stop_conditions or _NO_STOP,
        sampling=wire.sampling_options or _NO_SAMPLING,
        output=wire.output_options or _NO_OUTPUT,
        cache_salt=routing.cache_salt or _salt_of_extension(raw),
        priority=wire.priority,
        annotations=tuple(wire.annotations or ()),
        prefill_result=given.prefill_result,
        rendezvous=given.rendezvous,
        phase_request=wire.errand,
        pins={"prefill": routing.prefill_worker_id, "decode": routing.decode_worker_id},
        # What another worker sends on was chosen for that one's engine.
        dp_rank=routing.dp_rank if wire.errand is None else None,
        session_id=_session_of(raw),
        trace_headers=trace_headers,
        traceparent=wire.traceparent,
        decode_follows=given.decode_follows,
    )
    _require_servable(request)
    return request


#: What Dynamo's frontend adds to a request with images, audio or video in it.
_MEDIA_KEYS = (
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "multimodal_embedding_handles",
    "multi_modal_embeddings",
)


def require_text(raw: Any) -> None:
    """Raises InvalidRequestError for a request with media: its token ids alone would be answered as if it were text."""
    if not isinstance(raw, dict):
        return
    named = next((key for key in _MEDIA_KEYS if raw.get(key)), None) or _media_in_messages(raw)
    if named is not None:
        raise InvalidRequestError(
            f"{named}: this worker serves text; expected a request without images, audio or video"
        )


def _media_in_messages(raw: dict[str, Any]) -> str | None:
    """Where the messages, which the frontend passes on beside their tokens, have a part that is no text."""
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
        count = len(tokens) if isinstance(tokens, list) else len(tokens) // 4
        if count > longest:
            raise InvalidRequestError(
                f"the prompt has {count} tokens; max_seq_len {longest} leaves room for fewer"
            )


def _with_token_list(raw: Any) -> Any:
    """With DYN_TOKEN_IDS_AS_BYTES set, Dynamo packs the tokens as little-endian 32-bit numbers."""
    packed = raw.get("token_ids") if isinstance(raw, dict) else None
    if not isinstance(packed, (bytes, bytearray, memoryview)):
        return raw
    if len(packed) % 4:
        raise InvalidRequestError(f"request: {len(packed)} bytes are no whole token ids - at `$.token_ids`")
    return raw | {"token_ids": list(struct.unpack(f"<{len(packed) // 4}i", packed))}


def _salt_of_extension(raw: dict[str, Any]) -> str | None:
    """`nvext.cache_salt`, of frontends that do not make it a routing hint."""
    extra = raw.get("extra_args")
    extension = extra.get("nvext") if isinstance(extra, dict) else None
    salt = extension.get("cache_salt") if isinstance(extension, dict) else None
    return salt if isinstance(salt, str) and salt else None


def _session_of(raw: dict[str, Any]) -> str | None:
    context = raw.get("agent_context")
    session = context.get("session_id") if isinstance(context, dict) else None
    return (session.strip() or None) if isinstance(session, str) else None


def require_splittable(request: GenerateRequest, *, is_told_of_prompts: bool) -> None:
    """Raises InvalidRequestError for what a handoff has no room for: only an agg worker serves it.

    `is_told_of_prompts`: what prefill's engine tells of the prompt comes to the worker that answers the client.
    """
    if request.num_choices != 1:
        raise InvalidRequestError(
            f"n={request.num_choices}: a handoff carries one choice; expected n=1 of workers that share a request "
            "(send it several times, with different seeds, for several choices)"
        )
    if request.output.prompt_logprobs is not None and not is_told_of_prompts:
        # To a worker the two look the same.
        raise InvalidRequestError(
            "echo (or prompt_logprobs) is not served under the strategy router, nor with --schedule-style "
            "generation_first: what prefill computes of the prompt does not reach the answer; expected neither"
        )


def _require_servable(request: GenerateRequest) -> None:
    """What no worker of any strategy serves is refused here, so that all refuse it alike."""
    n, best_of = request.sampling.n, request.sampling.best_of
    if n is not None and n < 1:
        raise InvalidRequestError(f"n={n} is not allowed; expected at least 1")
    if best_of not in (None, request.num_choices):
        raise InvalidRequestError(
            f"best_of={best_of}: answers are sent as they are made, not compared; expected {request.num_choices}, as n"
        )
    if request.sampling.use_beam_search:
        raise InvalidRequestError("use_beam_search=true: KV transfer carries one beam; expected false")
    require_guides(request.sampling.guided_decoding or {})
    # 0 comes from no client, but from a frontend that lost its worker behind the last token (handlers/migration.py).
    if request.stop.max_tokens is not None and request.stop.max_tokens < 0:
        raise InvalidRequestError(f"max_tokens={request.stop.max_tokens} is not allowed; expected at least 1")


def encode_request(request: GenerateRequest, phase_request: PhaseRequest) -> dict[str, Any]:
    """For another worker: as it came, what is wanted of it, and what there is already: the prefill result, where
    Dynamo's router puts it, or the rendezvous.
    """
    added = {
        "prefill_result": request.prefill_result,
        "rendezvous": request.rendezvous,
        "errand": phase_request,
        "traceparent": request.span.traceparent,
    }
    return request.raw | {
        name: msgspec.to_builtins(value) for name, value in added.items() if value is not None
    }


def decode_chunk(raw: Any) -> TokenChunk:
    try:
        return msgspec.convert(raw, TokenChunk)
    except msgspec.ValidationError as error:
        raise PeerUnavailableError(f"the other stage sent an unreadable answer: {error}") from None


def encode_chunk(chunk: TokenChunk) -> dict[str, Any]:
    encoded: dict[str, Any] = msgspec.to_builtins(chunk)
    return encoded


def encode_disaggregated_params(params: Any) -> dict[str, Any]:
    """A DisaggregatedParams dataclass of either engine -> JSON-safe dict, as upstream's worker writes it."""
    encoded = {name: value for name, value in _fields(params).items() if value is not None}
    if "opaque_state" in encoded:
        encoded["opaque_state"] = base64.b64encode(encoded["opaque_state"]).decode()
    if "first_gen_log_probs" in encoded:
        encoded["first_gen_log_probs"] = [
            [{"token_id": int(t), "logprob": float(lp.logprob), "rank": lp.rank} for t, lp in entry.items()]
            if isinstance(entry, dict)
            else entry  # a plain number, when the request asks for no alternatives
            for entry in encoded["first_gen_log_probs"]
        ]
    # Tensors, and of no use to a decode that has the token.
    encoded.pop("first_gen_logits", None)
    return encoded


def names_a_sender(encoded: dict[str, Any]) -> bool:
    """Decode can find the KV."""
    return any(encoded.get(key) for key in _SENDER_KEYS)


def decode_disaggregated_params(result: PrefillResult, params_class: Any, logprob_class: Any) -> Any:
    """The engine's own dataclass, as a generation_only request. Raises HandoffRefusedError."""
    given = {key: value for key, value in result.disaggregated_params.items() if key not in _FOREIGN_KEYS}
    if not names_a_sender(given):
        raise HandoffRefusedError(f"handoff names no sender: it has neither {' nor '.join(_SENDER_KEYS)}")
    # An engine makes bytes of the state: of a number, so many of them.
    for name, kinds in (("opaque_state", (str, bytes)), ("first_gen_tokens", (list,))):
        if given.get(name) is not None and not isinstance(given[name], kinds):
            raise HandoffRefusedError(
                f"handoff is not readable: {name} is of type {type(given[name]).__name__}"
            )
    try:
        if isinstance(given.get("opaque_state"), str):
            given["opaque_state"] = base64.b64decode(given["opaque_state"], validate=True)
        if given.get("first_gen_log_probs"):
            given["first_gen_log_probs"] = [
                {e["token_id"]: logprob_class(logprob=e["logprob"], rank=e["rank"]) for e in entry}
                if isinstance(entry, list)
                else entry
                for entry in given["first_gen_log_probs"]
            ]
        return params_class(**(given | {"request_type": "generation_only"}))
    except (binascii.Error, TypeError, KeyError, ValueError, AttributeError) as error:
        raise HandoffRefusedError(f"handoff is not readable: {error}") from None


def _fields(params: Any) -> dict[str, Any]:
    # Not dataclasses.asdict: it would copy, and turn Logprob objects into dicts.
    return {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
