"""Images in every order: loaded once, where the prompt is computed; the decode gets the expanded prompt."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from PIL import Image

from tests.support.handling import (
    ORDERS,
    STRATEGIES,
    collect,
    joined,
    raw_request,
    tokens_of,
    until,
    untraced,
)
from tests.support.recording_pair import MAX_SEQ_LEN, Pair, make_pair, recording_engine
from tests.support.stage_client import FakeContext
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.engine import image_inputs
from trtllm_disagg.engine.image_inputs import Decode, ImageInputs
from trtllm_disagg.engines.recording.hard_edges import HardEdges
from trtllm_disagg.engines.recording.image_prompts import IMAGE_TOKEN
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.errors import EngineError, InvalidRequestError, PeerUnavailableError, RequestCancelledError
from trtllm_disagg.handlers.delivered import Appended
from trtllm_disagg.handlers.local import LocalAgg
from trtllm_disagg.types import GenerateRequest, Images, TokenChunk
from trtllm_disagg.wire.bodies import decode_request

PROMPT = [11, IMAGE_TOKEN, 12, IMAGE_TOKEN, 13]


class Loader:
    """Loads an image of the colour that an address names; the server of `silent` never answers."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.waits, self.was_left = asyncio.Event(), asyncio.Event()

    async def __call__(self, images: Images) -> Decode:
        urls = [each["Url"] for each in images.references]
        self.loaded += urls
        if "missing" in urls:
            raise InvalidRequestError("image 1 cannot be loaded: 404")
        if "silent" in urls:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.was_left.set()
        return lambda: [Image.new("RGB", (8, 8), url) for url in urls]


def asked(*colours: str, max_tokens: int | None = 5, **keys: Any) -> GenerateRequest:
    images = {"image_url": [{"Url": colour} for colour in colours]}
    raw = raw_request(max_tokens, **({"token_ids": list(PROMPT), "multi_modal_data": images} | keys))
    return decode_request(raw, takes_images=True)


async def answer_of_agg(request: GenerateRequest) -> TokenChunk:
    engine = recording_engine()
    engine.images = ImageInputs(Loader(), engine.llm.input_processor)
    return joined(await collect(LocalAgg(engine), request))


def pair_of(strategy: str, **settings: Any) -> tuple[Pair, Loader]:
    loader = Loader()
    pair = make_pair(strategy, **settings)
    for engine in pair.engines.values():
        engine.images = ImageInputs(loader, engine.llm.input_processor)
    return pair, loader


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_each_order_answers_as_agg_and_loads_each_image_once(strategy: str) -> None:
    pair, loader = pair_of(strategy)

    answer = joined(await collect(pair.generate, asked("red", "blue")))

    right = await answer_of_agg(asked("red", "blue"))
    assert (answer.token_ids, answer.finish_reason) == (right.token_ids, right.finish_reason)
    assert answer.completion_usage is not None
    assert answer.completion_usage.prompt_tokens == 3 + 2 * 16
    assert loader.loaded == ["red", "blue"]
    [decode] = pair.decode.calls_of("generate_async")
    assert isinstance(decode["inputs"], list), "no image"
    assert len(decode["inputs"]) == 3 + 2 * 16


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_swapped_images_have_another_answer(strategy: str) -> None:
    pair, _ = pair_of(strategy)
    answers = [
        tokens_of(await collect(pair.generate, asked(*each))) for each in (("red", "blue"), ("blue", "red"))
    ]
    assert answers[0] != answers[1]
    assert answers[1] == (await answer_of_agg(asked("blue", "red"))).token_ids


@pytest.mark.parametrize("order", ORDERS)
async def test_the_worker_alone_loads_the_images_when_the_other_stage_fails(order: str) -> None:
    pair, loader = pair_of(order)
    pair.client.fails_with(PeerUnavailableError("gone"))
    answer = joined(await collect(pair.generate, asked("red", "blue")))
    assert untraced(answer).token_ids == (await answer_of_agg(asked("red", "blue"))).token_ids
    assert set(loader.loaded) == {"red", "blue"}


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_image_that_cannot_be_loaded_is_the_clients_error_and_the_workers_go_on(
    strategy: str,
) -> None:
    pair, _ = pair_of(strategy)
    with pytest.raises(InvalidRequestError, match="image 1 cannot be loaded: 404"):
        await collect(pair.generate, asked("missing", "blue"))
    assert await collect(pair.generate, asked("red", "blue"))
    await pair.idle()
    assert len(LLM.kv_store) == 0


@pytest.mark.parametrize("strategy", [*STRATEGIES, "agg"])
async def test_a_client_that_leaves_while_its_images_load_ends_the_load(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_inputs, "_MAX_FETCHING", 1)
    pair, loader = pair_of("decode_first" if strategy == "agg" else strategy)
    generate = LocalAgg(pair.engines[Role.DECODE]) if strategy == "agg" else pair.generate
    context = FakeContext()
    answer = asyncio.create_task(collect(generate, asked("silent", "blue"), context))
    await loader.waits.wait()
    context.stop()
    async with asyncio.timeout(10):
        await loader.was_left.wait()
        with suppress(RequestCancelledError):
            assert await answer == []
        assert await collect(generate, asked("red", "blue"))
        await pair.idle()
    await until(lambda: len(LLM.kv_store) == 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_prompt_that_is_too_long_only_when_expanded_is_refused(strategy: str) -> None:
    pair, _ = pair_of(strategy)
    prompt = [*range(100, 100 + MAX_SEQ_LEN - 20), IMAGE_TOKEN, IMAGE_TOKEN]
    with pytest.raises(InvalidRequestError, match=f"the prompt has {MAX_SEQ_LEN - 20 + 32} tokens"):
        await collect(pair.generate, asked("red", "blue", token_ids=prompt))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_wrong_number_of_markers_is_refused(strategy: str) -> None:
    pair, _ = pair_of(strategy)
    with pytest.raises(InvalidRequestError, match="2 image markers"):
        await collect(pair.generate, asked("red"))


@pytest.mark.parametrize("order", ORDERS)
async def test_each_choice_is_about_the_image(order: str) -> None:
    pair, _ = pair_of(order)
    sampling = {"n": 2, "temperature": 1.0, "seed": 3}
    chunks = await collect(pair.generate, asked("red", "blue", sampling_options=sampling))
    by_index = {i: [t for each in chunks if each.index == i for t in each.token_ids] for i in (0, 1)}
    right = (await answer_of_agg(asked("red", "blue"))).token_ids
    assert all(tokens == right for tokens in by_index.values())


@pytest.mark.parametrize("order", ORDERS)
async def test_an_unused_handoff_of_images_is_freed(order: str) -> None:
    pair, _ = pair_of(order)
    asks = asked("red", "blue", max_tokens=50)
    stream = pair.generate(asks, FakeContext())
    await anext(stream)
    await stream.aclose()
    await pair.idle()
    await until(lambda: len(LLM.kv_store) == 0)


async def test_an_unknown_length_is_long_for_a_decider() -> None:
    pair, _ = pair_of("decode_first", prefill_decider="length", thresholds={"max_local_prefill_length": 100})
    request = asked("red", "blue")
    await collect(pair.generate, request)
    assert (request.trace.strategy, request.trace.reason) == ("decode_first", "image")
    known = asked("red", "blue", mm_routing_info={"expanded_prompt_len": 35})
    await collect(pair.generate, known)
    assert (known.trace.strategy, known.trace.reason) == ("local", "short")


async def test_an_engine_that_changes_the_clients_tokens_does_not_continue_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LLM, "next_edges", HardEdges(retokenises_prompts_with_images=True))
    engine = recording_engine()
    engine.images = ImageInputs(Loader(), engine.llm.input_processor)
    continued = Appended(asked("red", "blue"), [7, 8]).request
    assert tokens_of(await collect(LocalAgg(engine), asked("red", "blue")))
    with pytest.raises(EngineError, match="cannot be continued"):
        await collect(LocalAgg(engine), continued)
