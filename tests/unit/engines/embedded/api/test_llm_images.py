"""Images through the LLM API: what clients get, hand over, and are refused."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import Checkpoints
from tests.support.vision_models import MARKER, NUM_TOKENS, TOKENS, picture
from trtllm_disagg.engines.embedded import (
    LLM,
    DisaggregatedParams,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from trtllm_disagg.engines.embedded.api import images
from trtllm_disagg.engines.embedded.api.images import place_images
from trtllm_disagg.engines.embedded.params.request_params import DisaggScheduleStyle
from trtllm_disagg.errors import ConfigError

PROMPT = [5, 6, MARKER, 7, 8, 9, MARKER, 10]
EXPANDED = [5, 6, *[MARKER] * NUM_TOKENS, 7, 8, 9, *[MARKER] * NUM_TOKENS, 10]
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
CONTEXT_ONLY = DisaggregatedParams(request_type="context_only")


@pytest.fixture(scope="module")
def pair(llava: Path) -> Iterator[tuple[LLM, LLM]]:
    args: dict[str, Any] = {
        "kv_cache_config": {"max_tokens": 1024},
        "cache_transceiver_config": {"backend": "SHARED_MEMORY"},
        "skip_tokenizer_init": True,
    }
    with LLM(llava, **args) as prefill, LLM(llava, **args) as decode:
        yield prefill, decode


@pytest.fixture
def prefill(pair: tuple[LLM, LLM]) -> Iterator[LLM]:
    """It still answers after whatever a test does."""
    yield pair[0]
    assert len(pair[0].generate([5, 6, 7], PARAMS).outputs[0].token_ids) == 6


def inputs(*pictures: Any, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "multi_modal_data": {"image": list(pictures)}} | more


def handoff_of(result: RequestOutput, **changes: Any) -> DisaggregatedParams:
    params = result.outputs[0].disaggregated_params
    assert params is not None
    return dataclasses.replace(params, request_type="generation_only", **changes)


def test_two_engines_answer_as_one_does_with_swapped_images_too(pair: tuple[LLM, LLM]) -> None:
    answers = []
    for given in (inputs(picture(1), picture(2)), inputs(picture(2), picture(1))):
        whole = pair[0].generate(given, PARAMS)
        assert whole.prompt_token_ids == EXPANDED
        first = pair[0].generate(given, PARAMS, disaggregated_params=CONTEXT_ONLY)
        decoded = {"prompt_token_ids": first.prompt_token_ids, "multi_modal_data": None}
        second = pair[1].generate(decoded, PARAMS, disaggregated_params=handoff_of(first))
        assert second.outputs[0].token_ids == whole.outputs[0].token_ids
        answers.append(whole.outputs[0].token_ids)
    assert answers[0] != answers[1]


def test_the_hashes_are_eight_int32_numbers_of_the_content_of_each_image(prefill: LLM) -> None:
    same, other = picture(1).copy(), Image.new("RGB", (36, 40))
    other.frombytes(picture(1).tobytes())
    first = prefill.generate(inputs(same, other), PARAMS, disaggregated_params=CONTEXT_ONLY)
    again = prefill.generate(inputs(picture(1), picture(2)), PARAMS, disaggregated_params=CONTEXT_ONLY)
    hashes, others = handoff_of(first).multimodal_hashes, handoff_of(again).multimodal_hashes
    assert hashes is not None
    assert others is not None
    assert [len(each) for each in hashes] == [8, 8]
    assert all(-(1 << 31) <= number < 1 << 31 for each in hashes for number in each)
    assert hashes[0] == others[0] != hashes[1]


def test_the_input_processor_knows_marker_and_length(prefill: LLM) -> None:
    processor = prefill.input_processor
    assert processor is not None
    assert processor.get_mm_token_ids() == [MARKER]
    assert processor.get_num_tokens_per_image(image=picture(1)) == NUM_TOKENS


def test_a_text_prompt_is_served_as_before(pair: tuple[LLM, LLM]) -> None:
    whole = pair[0].generate([5, 6, 7], PARAMS)
    first = pair[0].generate([5, 6, 7], PARAMS, disaggregated_params=CONTEXT_ONLY)
    assert handoff_of(first).multimodal_hashes is None
    second = pair[1].generate([5, 6, 7], PARAMS, disaggregated_params=handoff_of(first))
    assert second.outputs[0].token_ids == whole.outputs[0].token_ids


ONE = [5, MARKER, 6]
BROKEN = io.BytesIO()
picture(1).save(BROKEN, "PNG")


def broken_image() -> Image.Image:
    return Image.open(io.BytesIO(BROKEN.getvalue()[:-60]))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (inputs(picture(1)), "the prompt has 2 image tokens .id 257., and the request 1 images"),
        (inputs(picture(1), prompt=[5]), "0 image tokens .* 1 images"),
        (ONE, "1 image tokens .* 0 images"),
        (inputs("x.png", prompt=ONE), "image 1 is a str; expected a PIL.Image.Image"),
        (inputs(picture(1, 1, 300), prompt=ONE), "1 x 300 pixels; one side may be at most 200 times"),
        (inputs(broken_image(), prompt=ONE), "image 1 cannot be read"),
        (inputs(picture(1), prompt=ONE, multi_modal_uuids={"image": ["a", "b"]}), "2 names for 1 images"),
        (inputs(picture(1), prompt=ONE, multi_modal_uuids={"image": [7]}), "expected ASCII strings"),
        (inputs(picture(1), prompt=ONE, multi_modal_uuids=["a"]), "must be dicts, such as"),
        ({"prompt_token_ids": ONE, "multi_modal_data": {"image": picture(1)}}, "must be lists"),
        ({"prompt_token_ids": ONE, "multi_modal_data": {"video": ["x"]}}, "multi_modal_data.video"),
        (inputs(picture(1), prompt=ONE, mm_processor_kwargs={"size": 2}), "mm_processor_kwargs"),
    ],
)
def test_images_that_do_not_fit_are_refused(prefill: LLM, given: Any, reason: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=reason):
        prefill.generate_async(given, PARAMS)


def test_prompt_logprobs_and_generation_first_are_refused_with_images(prefill: LLM) -> None:
    given = inputs(picture(1), prompt=ONE)
    with pytest.raises(NotImplementedError, match="prompt_logprobs is not served with images"):
        prefill.generate_async(given, SamplingParams(prompt_logprobs=1))
    style = dataclasses.replace(
        CONTEXT_ONLY, schedule_style=DisaggScheduleStyle.GENERATION_FIRST, disagg_request_id=7
    )
    with pytest.raises(NotImplementedError, match="GENERATION_FIRST is not served with images"):
        prefill.generate_async(given, PARAMS, disaggregated_params=style)
    params = dataclasses.replace(CONTEXT_ONLY, multimodal_hashes=[[0] * 8])
    with pytest.raises(ValueError, match="multimodal_hashes belong to a generation_only request"):
        prefill.generate_async(given, PARAMS, disaggregated_params=params)


def test_more_pixels_than_the_engine_takes_are_refused(prefill: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXEL_BYTES", 5000)
    with pytest.raises(
        ValueError, match="image 2 has 40 x 36 pixels; a request's images may have 1666 in all"
    ):
        prefill.generate_async(inputs(picture(1), picture(2)), PARAMS)


def test_images_are_refused_while_the_engine_has_not_received_earlier_ones(
    prefill: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(prefill._core), "unsent_bytes", 1 << 30)
    with pytest.raises(RequestError, match="has not received the images of earlier requests") as raised:
        prefill.generate(inputs(picture(1), picture(2)), PARAMS)
    assert raised.value.category == "CapacityExhausted"


def test_a_wrong_handoff_is_refused_and_the_right_one_is_served(pair: tuple[LLM, LLM]) -> None:
    first = pair[0].generate(inputs(picture(1), picture(2)), PARAMS, disaggregated_params=CONTEXT_ONLY)
    params = handoff_of(first)
    hashes = params.multimodal_hashes
    assert hashes is not None
    for wrong, reason in (
        (None, "multimodal_hashes name 0 images, and the prompt has 2"),
        (hashes[:1], "name 1 images"),
        ([hashes[0], hashes[1][:7]], "eight signed 32-bit numbers"),
        ([hashes[0], [1 << 31] * 8], "eight signed 32-bit numbers"),
    ):
        changed = dataclasses.replace(params, multimodal_hashes=wrong)
        with pytest.raises(ValueError, match=reason):
            pair[1].generate_async(EXPANDED, PARAMS, disaggregated_params=changed)
    with pytest.raises(ValueError, match="not whole images of 16"):
        pair[1].generate_async(EXPANDED[:-2], PARAMS, disaggregated_params=params)
    given = inputs(picture(1), picture(2), prompt=EXPANDED)
    with pytest.raises(ValueError, match="a generation_only request takes no images"):
        pair[1].generate_async(given, PARAMS, disaggregated_params=params)
    swapped = dataclasses.replace(params, multimodal_hashes=hashes[::-1])
    with pytest.raises(RequestError, match="the handoff belongs to another prompt"):
        pair[1].generate(EXPANDED, PARAMS, disaggregated_params=swapped)
    assert pair[1].generate(EXPANDED, PARAMS, disaggregated_params=params).outputs[0].token_ids


def test_images_beside_each_other_are_told_apart() -> None:
    given = place_images([MARKER, MARKER, 5], inputs(picture(1), picture(2)), None, "context_only", TOKENS)
    assert [image.start for image in given.images] == [0, NUM_TOKENS]
    assert place_images(given.token_ids, None, given.hashes, "generation_only", TOKENS).virtual_ids == (
        given.virtual_ids
    )


def test_a_model_without_a_tower_takes_no_images(checkpoints: Checkpoints) -> None:
    given = inputs(picture(1), prompt=ONE)
    with pytest.raises(ValueError, match="this model takes no images"):
        place_images(ONE, given, None, "context_and_generation", None)
    with pytest.raises(ValueError, match="this model takes no images"):
        place_images(ONE, None, [[0] * 8], "generation_only", None)
    assert place_images(ONE, ONE, None, "context_only", None).virtual_ids == ONE


def test_a_model_with_a_tower_is_refused_for_several_ranks(llava: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 2 .* 1 for a model that takes images"):
        LLM(llava, tensor_parallel_size=2)
