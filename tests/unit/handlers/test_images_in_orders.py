"""Images in every order: loaded once, where the prompt is computed; the decode gets the expanded prompt."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from tests.support.handling import (
    ORDERS,
    STRATEGIES,
    collect,
    joined,
    raw_request,
    tokens_of,
    until,
)
from tests.support.recording_pair import MAX_SEQ_LEN, Loader, Pair, make_pair, recording_engine, seeing
from tests.support.stage_client import FakeContext, Raw
from tests.unit.handlers.test_migrated import migrated
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.engine import image_inputs
from trtllm_disagg.engines.recording.hard_edges import HardEdges
from trtllm_disagg.engines.recording.image_prompts import IMAGE_TOKEN
from trtllm_disagg.engines.recording.llm import LLM, Script
from trtllm_disagg.errors import EngineError, InvalidRequestError, PeerUnavailableError, RequestCancelledError
from trtllm_disagg.handlers.delivered import Appended
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.local import LocalAgg
from trtllm_disagg.types import GenerateRequest, TokenChunk
from trtllm_disagg.wire.bodies import decode_request, phase_of

PROMPT = [11, IMAGE_TOKEN, 12, IMAGE_TOKEN, 13]
EXPANDED = 3 + 2 * 16


def raw_about(*colours: str, max_tokens: int | None = 5, **keys: Any) -> Raw:
    images = {"image_url": [{"Url": colour} for colour in colours]}
    return raw_request(max_tokens, **({"token_ids": list(PROMPT), "multi_modal_data": images} | keys))


def about(*colours: str, max_tokens: int | None = 5, **keys: Any) -> GenerateRequest:
    return decode_request(raw_about(*colours, max_tokens=max_tokens, **keys), takes_images=True)


async def answer_of_agg(request: GenerateRequest) -> TokenChunk:
    return joined(await collect(LocalAgg(recording_engine()), request))


def pair_of(strategy: str, **settings: Any) -> tuple[Pair, Loader]:
    pair = make_pair(strategy, **settings)
    return pair, seeing(*pair.engines.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_each_order_answers_as_agg_and_loads_each_image_once(strategy: str) -> None:
    pair, loader = pair_of(strategy)
    for colours in (["red", "blue"], ["blue", "red"]):
        answer = joined(await collect(pair.generate, about(*colours)))
        right = await answer_of_agg(about(*colours))
        assert (answer.token_ids, answer.finish_reason) == (right.token_ids, right.finish_reason)
        assert answer.completion_usage is not None
        assert answer.completion_usage.prompt_tokens == EXPANDED
    assert loader.loaded == ["red", "blue", "blue", "red"]
    for decode in pair.decode.calls_of("generate_async"):
        assert isinstance(decode["inputs"], list), "no image"
        assert len(decode["inputs"]) == EXPANDED


#: Order, and what happens; `None`: the frontend migrates the answer after 120 tokens.
LOSSES: list[tuple[str, str | None]] = [
    *((order, lost) for order in ORDERS for lost in (None, "the other stage")),
    ("prefill_first", "decode after 120 tokens"),
]


@pytest.mark.parametrize(("order", "lost"), LOSSES)
async def test_an_answer_goes_on_about_its_images(order: str, lost: str | None) -> None:
    """Usage is that of one answer."""
    pair, loader = pair_of(order)
    raw = raw_about("red", "blue", max_tokens=150)
    if lost == "the other stage":
        pair.client.fails_with(PeerUnavailableError("gone"))
    elif lost:
        pair.decode.scripts.append(Script(error=RuntimeError("died"), error_at=120))
    chunks = await collect(pair.generate, decode_request(raw, takes_images=True))
    if lost is None:
        link = chunks[0].worker_trace_link
        chunks = [TokenChunk(tokens_of(chunks)[:120], worker_trace_link=link)]
        chunks += await collect(pair.generate, migrated(raw, chunks))
    answer, right = joined(chunks), await answer_of_agg(about("red", "blue", max_tokens=150))
    assert (answer.token_ids, answer.finish_reason) == (right.token_ids, right.finish_reason)
    assert (usage := answer.completion_usage) is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (EXPANDED, 150)
    assert set(loader.loaded) == {"red", "blue"}
    await pair.idle()
    assert len(LLM.kv_store) == 0, "an unused handoff is freed"


#: Tokens, colours -> the reason.
REFUSED = {
    "image 1 cannot be loaded: 404": (PROMPT, ("missing", "blue")),
    "2 image markers": (PROMPT, ("red",)),
    f"the prompt has {MAX_SEQ_LEN + 12} tokens": ([*range(100, 77 + MAX_SEQ_LEN), *PROMPT], ("red", "blue")),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_cannot_be_answered_is_refused_by_name_and_the_workers_go_on(
    strategy: str, reason: str
) -> None:
    pair, _ = pair_of(strategy)
    tokens, colours = REFUSED[reason]
    with pytest.raises(InvalidRequestError, match=reason):
        await collect(pair.generate, about(*colours, token_ids=tokens))
    assert await collect(pair.generate, about("red", "blue"))
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
    answer = asyncio.create_task(collect(generate, about("silent", "blue"), context))
    await loader.waits.wait()
    context.stop()
    async with asyncio.timeout(10):
        await loader.was_left.wait()
        with suppress(RequestCancelledError):
            assert await answer == []
        assert await collect(generate, about("red", "blue"))
        await pair.idle()
    await until(lambda: len(LLM.kv_store) == 0)


@pytest.mark.parametrize("order", ORDERS)
async def test_each_choice_is_about_the_image(order: str) -> None:
    pair, _ = pair_of(order)
    sampling = {"n": 2, "temperature": 1.0, "seed": 3}
    chunks = await collect(pair.generate, about("red", "blue", sampling_options=sampling))
    by_index = {i: [t for each in chunks if each.index == i for t in each.token_ids] for i in (0, 1)}
    right = (await answer_of_agg(about("red", "blue"))).token_ids
    assert all(tokens == right for tokens in by_index.values())


#: Strategy -> what runs for an unknown and for a known length, and the reasons.
DECIDED = {
    "decode_first": [("decode_first", "image"), ("local", "short")],
    "prefill_first": [("prefill_first", "image"), ("local", "short")],
    "auto": [("decode_first", "auto_image"), ("local", "auto_short")],
}


@pytest.mark.parametrize("strategy", DECIDED)
async def test_an_unknown_length_is_long_and_each_choice_answers_as_agg(strategy: str) -> None:
    pair, _ = pair_of(strategy, prefill_decider="length", thresholds={"max_local_prefill_length": 100})
    known: dict[str, Any] = {"mm_routing_info": {"expanded_prompt_len": EXPANDED}}
    requests = about("red", "blue"), about("red", "blue", **known)
    right = (await answer_of_agg(about("red", "blue"))).token_ids
    for request in requests:
        assert tokens_of(await collect(pair.generate, request)) == right
    assert [(each.trace.strategy, each.trace.reason) for each in requests] == DECIDED[strategy]


async def test_the_next_turn_of_a_conversation_computes_the_answer_before_it() -> None:
    """Decode's blocks are not pulled: only prefill's engine keys them by image."""
    pair, _ = pair_of("prefill_first", pull_min_tokens=2)
    first = tokens_of(await collect(pair.generate, about("red", "blue", max_tokens=90)))
    await until(lambda: not num_in_background())
    turn = about("red", "blue", token_ids=[*PROMPT, *first, 14, 15])
    assert tokens_of(await collect(pair.generate, turn)) == (await answer_of_agg(turn)).token_ids
    assert [phase_of(each) for each in pair.client.requests] == ["decode", "decode"]


async def test_an_engine_that_changes_the_clients_tokens_does_not_continue_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LLM, "next_edges", HardEdges(retokenises_prompts_with_images=True))
    engine = recording_engine()
    continued = Appended(about("red", "blue"), [7, 8]).request
    assert tokens_of(await collect(LocalAgg(engine), about("red", "blue")))
    with pytest.raises(EngineError, match="cannot be continued"):
        await collect(LocalAgg(engine), continued)
