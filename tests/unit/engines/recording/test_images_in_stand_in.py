"""Images in the stand-in: expanded prompts, answers about each image, and TensorRT-LLM's hard edges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.mounted_recording import mounted_recording_llm
from trtllm_disagg.engines.recording.hard_edges import FORGIVING, PESSIMISTIC, HardEdges
from trtllm_disagg.engines.recording.image_prompts import HOST_MEMORY
from trtllm_disagg.engines.recording.image_prompts import IMAGE_TOKEN as IMG
from trtllm_disagg.engines.recording.llm import (
    LLM,
    DisaggregatedParams,
    RequestError,
    RequestOutput,
    SamplingParams,
    SharedTensorContainer,
)

BOTH = pytest.mark.parametrize("edges", [PESSIMISTIC, FORGIVING], ids=["hard", "soft"])
RED, BLUE = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
PROMPT = [11, IMG, 12, IMG, 13, 14, 15]
EXPANDED = [11, *[IMG] * 16, 12, *[IMG] * 16, 13, 14, 15]
TRANSCEIVER = {"backend": "NIXL", "kv_transfer_timeout_ms": 60000}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with mounted_recording_llm():
        yield


def make(edges: HardEdges = PESSIMISTIC, model: object = "org/model", **kv_cache: Any) -> LLM:
    """Its fourth block of KV ends inside the second image of `EXPANDED`."""
    LLM.next_edges = edges
    config = {"tokens_per_block": 8, "event_buffer_max_size": 99} | kv_cache
    return LLM(str(model), cache_transceiver_config=TRANSCEIVER, kv_cache_config=config)


def inputs(*images: Any, prompt: list[int] = PROMPT, **keys: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "multi_modal_data": {"image": list(images)}, **keys}


async def run(llm: LLM, asked: Any, params: DisaggregatedParams | None = None) -> RequestOutput:
    return await llm.generate_async(
        asked, SamplingParams(max_tokens=8), disaggregated_params=params
    ).aresult()


async def answer(llm: LLM, asked: Any, params: DisaggregatedParams | None = None) -> list[int]:
    return (await run(llm, asked, params)).outputs[0].token_ids


async def prefill(llm: LLM, asked: Any) -> tuple[list[int], DisaggregatedParams]:
    """Prompt and parameters of the decode."""
    result = await run(llm, asked, DisaggregatedParams(request_type="context_only"))
    made = result.outputs[0].disaggregated_params
    assert made is not None
    return result.prompt_token_ids, replace(made, request_type="generation_only")


@BOTH
@pytest.mark.parametrize("reuses", [False, True])
async def test_pair_answers_like_one_engine_but_for_hard_edges_of_block_reuse(
    edges: HardEdges, reuses: bool
) -> None:
    decode = make(edges, enable_block_reuse=reuses, tokens_per_block=2)
    pairs = (RED, BLUE), (BLUE, RED), (BLUE, BLUE)
    right = [await answer(make(edges), inputs(*pair)) for pair in pairs]
    assert len({tuple(each) for each in right}) == 3
    given = [await answer(decode, *(await prefill(make(edges), inputs(*pair)))) for pair in pairs]
    assert given == ([right[0]] * 3 if reuses and edges is PESSIMISTIC else right)
    prompt, params = await prefill(make(edges), inputs(RED, BLUE))
    assert await answer(decode, {"prompt_token_ids": prompt, "multi_modal_data": None}, params) == right[0]


@BOTH
async def test_hard_edges_retokenise_the_prompt_and_omit_hashes(edges: HardEdges) -> None:
    prompt, params = await prefill(make(edges), inputs(RED, BLUE))
    assert prompt == (EXPANDED if edges is FORGIVING else [*EXPANDED[:-3], 13 + 14, 15])
    assert (await prefill(make(edges), inputs(RED, prompt=[11, IMG])))[0] == [11, *[IMG] * 16]
    if edges is PESSIMISTIC:
        assert params.multimodal_hashes is None
    else:
        assert [len(each) for each in params.multimodal_hashes or ()] == [8, 8]


async def test_worker_processes_answer_from_the_handoffs_hashes() -> None:
    LLM.next_edges = FORGIVING
    first, second, whole = [
        LLM("m", recording={"image_tokens": 3}, cache_transceiver_config=TRANSCEIVER) for _ in range(3)
    ]
    prompt, params = await prefill(first, inputs(RED, BLUE))
    assert first.calls_of("generate_async")[0]["inputs"] == prompt
    assert first.input_processor.get_mm_token_ids() == [IMG]
    assert prompt.count(IMG) == 2 * first.input_processor.get_num_tokens_per_image(image=RED) == 6
    assert await answer(second, prompt, params) == await answer(whole, inputs(RED, BLUE))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (inputs(RED), "2 image markers .* for 1 images"),
        (inputs(RED, BLUE, prompt=EXPANDED), "32 image markers .* for 2 images"),
        (inputs(RED, b"GIF89a"), "bytes is not an image"),
        (inputs(RED, BLUE, multi_modal_uuids={"image": ["a"]}), "1 multi_modal_uuids for 2 images"),
    ],
)
async def test_wrong_images_are_refused_and_the_engine_lives(asked: Any, message: str) -> None:
    llm = make()
    with pytest.raises(ValueError, match=message):
        llm.generate_async(asked)
    await run(llm, inputs(RED, BLUE))


async def test_decode_a_text_model_and_skip_tokenizer_init_refuse_images(tmp_path: Path) -> None:
    _, params = await prefill(make(), inputs(RED, BLUE))
    (tmp_path / "config.json").write_text("{}")
    for llm, given, message in (
        (make(), params, "generation_only takes no images"),
        (make(model=tmp_path), None, "0 image markers"),
        (LLM("m", skip_tokenizer_init=True), None, "skip_tokenizer_init"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate_async(inputs(RED, BLUE), SamplingParams(end_id=2), disaggregated_params=given)


async def test_events_name_the_images_of_each_block_and_a_decodes_do_not() -> None:
    llm, decode = make(FORGIVING), make()
    pair = await prefill(llm, inputs(RED, BLUE, multi_modal_uuids={"image": ["red", None]}))
    (stored,) = [e["data"]["blocks"] for e in llm.get_kv_cache_events() if e["data"]["type"] == "stored"]
    blue = "".join(f"{number & 0xFFFFFFFF:08x}" for number in (pair[1].multimodal_hashes or [])[1])
    keys = [[(key["hash"], key["start_offset"]) for key in block["mm_keys"]] for block in stored]
    assert keys == [[("red", 0)], [("red", 7)], [("red", 15), (blue, 0)], [(blue, 6)]]
    assert [token["token_id"] for block in stored for token in block["tokens"]] == EXPANDED[:32]
    await run(decode, *pair)
    assert "mm_keys" not in json.dumps(decode.get_kv_cache_events())
    assert [(await run(llm, inputs(RED, each))).cached_tokens for each in (BLUE, RED)] == [32, 16]


async def test_positions_of_an_mrope_model_open_on_their_own_host_only(tmp_path: Path) -> None:
    config = {"image_token_id": IMG, "text_config": {"rope_scaling": {"mrope_section": [16, 24, 24]}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prefills, decode = make(model=tmp_path), make(model=tmp_path, enable_block_reuse=False)
    prompt, params = await prefill(prefills, inputs(RED, BLUE))
    handles = params.mrope_position_ids_handle or {}, params.mrope_position_deltas_handle or {}
    assert json.loads(json.dumps(handles)) == list(handles)
    ids, deltas = (SharedTensorContainer.from_dict(handle).get_local_view() for handle in handles)
    assert (list(ids.shape), deltas.tolist()) == ([3, 1, len(prompt)], [[-32]])
    HOST_MEMORY.clear()
    for lost in (params, replace(params, mrope_position_ids_handle=None)):
        with pytest.raises(RequestError, match="mrope_config"):
            await run(decode, prompt, lost)
    params.mrope_position_ids_handle, params.mrope_position_deltas_handle = (
        SharedTensorContainer.from_tensor(each).dump_to_dict() for each in (ids, deltas)
    )
    assert await answer(decode, prompt, params) == await answer(make(), inputs(RED, BLUE))
    await run(decode, *(await prefill(prefills, [11, 12])))
