"""Images in bodies, and in handoffs the prompt that a prefill engine made of them, by the names of Dynamo's worker.

Only the worker that computes the prompt loads images. A decode gets the expanded prompt with the handoff.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from trtllm_disagg.errors import EngineError, HandoffRefusedError, InvalidRequestError
from trtllm_disagg.types import GenerateRequest, Handoff, Images, TokenId

_IMAGES, _URL = "image_url", "Url"
#: Media of other sources than addresses.
_REFUSED_KEYS = ("multi_modal_uuids", "multimodal_embedding_handles", "multi_modal_embeddings")
#: Dynamo's frontend adds these keys to a request with images, audio or video.
MEDIA_KEYS = ("multi_modal_data", "mm_processor_kwargs", *_REFUSED_KEYS)
#: Further keys that a decode does not need; in `extra_args`, the chat with its images again.
_OF_MEDIA, _OF_MEDIA_IN_EXTRA = (
    ("mm_routing_info", "image_cache_scope"),
    ("messages", "formatted_prompt", "mm_hashes"),
)


def images_in(raw: dict[str, Any], *, takes_images: bool) -> Images | None:
    """The request's images; None: text. Raises InvalidRequestError, naming the key, for media that this worker does not
    serve: an answer to the token ids alone would ignore them.
    """
    parts = [f"extra_args.messages: {part}" for part in _media_in_messages(raw)]
    named = [*(key for key in MEDIA_KEYS if raw.get(key)), *parts]
    if not named:
        return None
    if not takes_images:
        raise InvalidRequestError(
            f"{named[0]}: this worker serves text; expected a request without images, audio or video "
            "(images need --enable-multimodal on all workers)"
        )
    refused = [key for key in _REFUSED_KEYS if raw.get(key)]
    refused += [part for part in parts if "image" not in part]
    data = raw.get("multi_modal_data")
    if not isinstance(data, dict) or refused:
        raise InvalidRequestError(f"{(refused or named)[0]}: {_ALLOWED}")
    refused = [key for key, value in data.items() if value and key != _IMAGES]
    references = data.get(_IMAGES)
    if refused or not isinstance(references, list) or not references:
        raise InvalidRequestError(f"multi_modal_data.{', '.join(refused) or _IMAGES}: {_ALLOWED}")
    for number, each in enumerate(references):
        if not isinstance(each, dict) or [*each] != [_URL] or not isinstance(each[_URL], str):
            raise InvalidRequestError(f"multi_modal_data.{_IMAGES}[{number}]: {_ALLOWED}")
    hashes, scope = _group(raw, "extra_args").get("mm_hashes"), raw.get("image_cache_scope")
    if not isinstance(hashes, list) or len(hashes) != len(references):
        hashes = []
    return Images(
        references,
        [str(each) for each in hashes],
        _group(raw, "mm_processor_kwargs") or None,
        scope if isinstance(scope, str) else None,
        _num_added(raw),
    )


_ALLOWED = (
    "this worker serves text and images; expected image_url parts, each with an https: or data: address"
)


def _media_in_messages(raw: dict[str, Any]) -> Iterator[str]:
    """The types of the parts other than text in the messages, which the frontend forwards beside the tokens."""
    messages = _group(raw, "extra_args").get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            part_type = part.get("type") if isinstance(part, dict) else None
            if isinstance(part_type, str) and part_type.startswith(_MEDIA_PARTS):
                yield part_type


#: `image_url`, `input_audio`, `video_url` etc. of OpenAI's API.
_MEDIA_PARTS = ("image", "input_image", "audio", "input_audio", "video", "input_video")


def _num_added(raw: dict[str, Any]) -> int | None:
    """What a frontend that reads the sizes of images says about the expanded prompt; None: nothing."""
    expanded, tokens = _group(raw, "mm_routing_info").get("expanded_prompt_len"), raw.get("token_ids")
    return expanded - len(tokens) if isinstance(expanded, int) and isinstance(tokens, list) else None


def _group(raw: dict[str, Any], name: str) -> dict[str, Any]:
    given = raw.get(name)
    return given if isinstance(given, dict) else {}


#: The key of a handoff's `disaggregated_params` with the prompt of its KV.
PREFILL_PROMPT = "_epd_metadata"


class PrefillPrompt(msgspec.Struct, frozen=True):
    token_ids: list[TokenId] = msgspec.field(name="_prefill_prompt_token_ids")
    #: Dynamo's decode reads the tokens only beside a text; its prefill sends none where TensorRT-LLM makes none.
    text: str = msgspec.field(name="_prefill_prompt", default="")


def encode_prompt(token_ids: Sequence[int], text: str | None) -> dict[str, Any]:
    """For the handoff of a prompt with images: `token_ids` with the markers expanded."""
    return {PREFILL_PROMPT: msgspec.to_builtins(PrefillPrompt(list(token_ids), text or "(token ids)"))}


def with_handoff(request: GenerateRequest, handoff: Handoff) -> GenerateRequest:
    """The request for a decode of this handoff: without images, since their KV comes with it."""
    if request.images is None:
        return request.with_handoff(handoff)
    raw = {key: value for key, value in request.raw.items() if key not in (*MEDIA_KEYS, *_OF_MEDIA)}
    if "extra_args" in raw:
        extra = _group(raw, "extra_args").items()
        raw["extra_args"] = {key: value for key, value in extra if key not in _OF_MEDIA_IN_EXTRA}
    return msgspec.structs.replace(request, raw=raw).with_handoff(handoff)


def as_prefilled(request: GenerateRequest, *, takes_images: bool) -> GenerateRequest:
    """The request for this worker's own decode: with the prompt as the prefill engine expanded it. Raises
    HandoffRefusedError for a handoff without that prompt, InvalidRequestError unless this worker `takes_images`,
    EngineError as `require_appended`.
    """
    params = request.prefill_result.disaggregated_params if request.prefill_result is not None else {}
    if request.images is None and PREFILL_PROMPT not in params:
        return request
    if not takes_images:
        raise InvalidRequestError("the prompt has images, and this decode worker has no --enable-multimodal")
    try:
        prompt = msgspec.convert(params.get(PREFILL_PROMPT), PrefillPrompt)
    except msgspec.ValidationError as error:
        raise HandoffRefusedError(f"handoff of a prompt with images: {PREFILL_PROMPT}: {error}") from None
    require_appended(request, prompt.token_ids)
    if request.images is not None:
        request.images.num_added = len(prompt.token_ids) - len(request.token_ids)
    return msgspec.structs.replace(request, token_ids=prompt.token_ids, images=None, num_appended=0)


def require_appended(request: GenerateRequest, expanded: Sequence[int]) -> None:
    """Raises EngineError if the engine's image processor changed the tokens that the client has. Most of TensorRT-LLM's
    processors make a text of the tokens, and tokens of the text.
    """
    count = request.num_appended
    if count and list(expanded[-count:]) != request.token_ids[-count:]:
        raise EngineError("the answer cannot be continued: the engine's image processor changed its tokens")
