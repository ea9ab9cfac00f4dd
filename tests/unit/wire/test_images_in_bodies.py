"""Reads images from bodies, and keeps them out of the bodies of decodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.handling import PROMPT, raw_request
from trtllm_disagg.errors import EngineError, HandoffRefusedError, InvalidRequestError
from trtllm_disagg.handlers.peers import DECODE
from trtllm_disagg.types import GenerateRequest, Handoff, PrefillResult, TokenChunk
from trtllm_disagg.wire.bodies import decode_request, encode_request, phase_of
from trtllm_disagg.wire.images import as_prefilled, encode_prompt, with_handoff

URL = {"Url": "https://example.com/a.png"}
PART = {"type": "image_url", "image_url": {"url": ""}}
EXPANDED = [11, 12, 12, 12, 13]


def with_images(**changes: Any) -> dict[str, Any]:
    chat = [{"role": "user", "content": [{"type": "text", "text": "What?"}, PART]}]
    extra = {"messages": chat, "formatted_prompt": "What?<image>", "mm_hashes": ["aa"], "nvext": {"kept": 1}}
    return raw_request(multi_modal_data={"image_url": [URL]}, extra_args=extra) | changes


def read(raw: dict[str, Any]) -> GenerateRequest:
    return decode_request(raw, takes_images=True)


def handed_over(**params: Any) -> PrefillResult:
    return PrefillResult({"opaque_state": "AA==", "first_gen_tokens": [5]} | params)


def test_images_are_read_with_their_hashes_and_their_length_is_unknown() -> None:
    images = read(with_images()).images
    assert images is not None
    assert (images.references, images.hashes, images.num_added) == ([URL], ["aa"], None)
    assert not read(with_images()).has_known_length


def test_the_frontends_length_counts_where_it_is_known() -> None:
    request = read(with_images(mm_routing_info={"expanded_prompt_len": 18}))
    assert (request.num_prompt, request.has_known_length) == (18, True)
    assert len(request.token_ids) == len(PROMPT)


def test_a_text_has_no_images_and_its_own_length() -> None:
    request = read(raw_request(multi_modal_data=None))
    assert request.images is None
    assert request.num_prompt == len(PROMPT)


def test_images_are_refused_with_the_flag_that_serves_them() -> None:
    with pytest.raises(InvalidRequestError, match=r"multi_modal_data: .*--enable-multimodal"):
        decode_request(with_images())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"multi_modal_data": {"video_url": [URL]}}, r"multi_modal_data\.video_url"),
        ({"multi_modal_data": {"image_url": [URL], "audio_url": [URL]}}, r"multi_modal_data\.audio_url"),
        ({"multi_modal_data": {"image_url": [{"Decoded": {}}]}}, r"image_url\[0\]"),
        ({"multi_modal_data": {"image_url": [URL, {"UuidOnly": "u"}]}}, r"image_url\[1\]"),
        ({"multi_modal_data": {"image_url": [{"Url": 5}]}}, r"image_url\[0\]"),
        ({"multi_modal_data": {"image_url": {}}}, r"multi_modal_data\.image_url"),
        ({"multi_modal_data": [URL]}, "multi_modal_data"),
        ({"multi_modal_data": None}, r"extra_args\.messages: image_url"),
        ({"multi_modal_uuids": {"image_url": ["u"]}}, "multi_modal_uuids"),
        ({"multi_modal_embeddings": "a.safetensors"}, "multi_modal_embeddings"),
        ({"output_options": {"prompt_logprobs": 0}}, "echo"),
        (
            {"extra_args": {"messages": [{"content": [PART, {"type": "input_audio"}]}]}},
            r"extra_args\.messages: input_audio",
        ),
    ],
)
def test_other_media_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        read(with_images(**changes))


def test_the_body_for_a_decode_has_the_handoff_in_place_of_the_images() -> None:
    handoff = Handoff(TokenChunk([5]), handed_over(**encode_prompt(EXPANDED, None)))
    body = encode_request(
        with_handoff(read(with_images(mm_routing_info={"expanded_prompt_len": 5})), handoff), DECODE
    )
    assert phase_of(body) == "decode"
    assert body["extra_args"] == {"nvext": {"kept": 1}}
    assert not body.keys() & {"multi_modal_data", "mm_routing_info"}
    received = as_prefilled(read(body), takes_images=True)
    assert (received.token_ids, received.images) == (EXPANDED, None)


def test_the_handoffs_names_are_those_that_dynamos_worker_reads() -> None:
    metadata = encode_prompt(EXPANDED, "What?")["_epd_metadata"]
    assert metadata == {"_prefill_prompt_token_ids": EXPANDED, "_prefill_prompt": "What?"}
    assert encode_prompt(EXPANDED, None)["_epd_metadata"]["_prefill_prompt"], "else it ignores the tokens"


def test_a_decode_uses_the_expanded_prompt_and_the_request_learns_its_length() -> None:
    request = read(
        with_images(prefill_result=msgspec.to_builtins(handed_over(**encode_prompt(EXPANDED, None))))
    )
    assert as_prefilled(request, takes_images=True).token_ids == EXPANDED
    assert request.num_prompt == len(EXPANDED)


@pytest.mark.parametrize(
    "params", [{}, {"_epd_metadata": {}}, {"_epd_metadata": {"_prefill_prompt_token_ids": [-1]}}]
)
def test_a_handoff_without_the_expanded_prompt_is_refused(params: dict[str, Any]) -> None:
    request = read(with_images(prefill_result=msgspec.to_builtins(handed_over(**params))))
    with pytest.raises(HandoffRefusedError, match="_epd_metadata"):
        as_prefilled(request, takes_images=True)


def test_a_prompt_of_dynamos_prefill_worker_needs_no_text() -> None:
    """Newer releases of TensorRT-LLM make none of tokens and images."""
    handoff = handed_over(_epd_metadata={"_prefill_prompt_token_ids": EXPANDED})
    request = read(with_images(prefill_result=msgspec.to_builtins(handoff)))
    assert as_prefilled(request, takes_images=True).token_ids == EXPANDED


def test_a_decode_worker_without_the_flag_refuses_the_handoff_of_images() -> None:
    prefill_result = msgspec.to_builtins(handed_over(**encode_prompt(EXPANDED, None)))
    with pytest.raises(InvalidRequestError, match="--enable-multimodal"):
        as_prefilled(decode_request(raw_request(prefill_result=prefill_result)), takes_images=False)


@pytest.mark.parametrize(
    ("expanded", "is_same"), [([11, 12, 12, 13, 7, 8], True), ([11, 12, 12, 13, 78], False)]
)
def test_an_answer_goes_on_only_behind_the_tokens_that_the_client_has(
    expanded: list[int], is_same: bool
) -> None:
    request = read(
        with_images(prefill_result=msgspec.to_builtins(handed_over(**encode_prompt(expanded, None))))
    )
    request = msgspec.structs.replace(request, token_ids=[*PROMPT, 7, 8], num_appended=2)
    if is_same:
        assert as_prefilled(request, takes_images=True).token_ids == expanded
        return
    with pytest.raises(EngineError, match="cannot be continued"):
        as_prefilled(request, takes_images=True)
