"""context_only here, generation_only there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.conformance.api import (
    IS_EMBEDDED,
    OTHER_PROMPT,
    PROMPT,
    disaggregated,
    find,
    needs_a_model,
    sampling,
)


async def prefill(
    llm: Any, prompt: list[int] = PROMPT, disagg_request_id: int | None = None, **fields: Any
) -> Any:
    params = disaggregated(request_type="context_only", disagg_request_id=disagg_request_id)
    return await llm.generate_async(prompt, sampling(**fields), disaggregated_params=params).aresult()


def handoff_of(result: Any) -> Any:
    """As a worker passes it on: a copy of every field, for the other phase."""
    given = result.outputs[0].disaggregated_params
    return dataclasses.replace(given, request_type="generation_only")


def decode(llm: Any, handoff: Any, prompt: list[int] = PROMPT, streaming: bool = False, **fields: Any) -> Any:
    return llm.generate_async(prompt, sampling(**fields), disaggregated_params=handoff, streaming=streaming)


async def drain(llm: Any, result: Any, prompt: list[int] = PROMPT) -> None:
    """No other request would fetch this prefill's KV."""
    await decode(llm, handoff_of(result), prompt, max_tokens=1)


# -- context_only


async def test_prefill_with_any_max_tokens_gives_one_token_and_its_handoff(llm: Any, decode_llm: Any) -> None:
    result = await prefill(llm, max_tokens=40)
    assert result.outputs[0].length == 1
    assert result.outputs[0].finish_reason in ("length", "not_finished")
    params = result.outputs[0].disaggregated_params
    assert isinstance(params, find("DisaggregatedParams"))
    assert params.request_type == "context_only"
    assert list(params.first_gen_tokens) == list(result.outputs[0].token_ids)
    assert isinstance(params.ctx_request_id, int)
    # The C++ transceiver fills the one, the Python one the other.
    assert params.opaque_state or params.ctx_info_endpoint
    assert params.opaque_state is None or isinstance(params.opaque_state, bytes)
    await drain(decode_llm, result)


async def test_both_phases_go_by_the_disagg_request_id(llm: Any, decode_llm: Any) -> None:
    made = find("get_global_disagg_request_id")(1)
    result = await prefill(llm, disagg_request_id=made)
    assert result.outputs[0].disaggregated_params.ctx_request_id == made
    await drain(decode_llm, result)


async def test_the_first_tokens_logprob_travels(llm: Any, decode_llm: Any) -> None:
    result = await prefill(llm, logprobs=1)
    first = result.outputs[0].token_ids[0]
    entry = handoff_of(result).first_gen_log_probs[0]
    output = (await decode(decode_llm, handoff_of(result), logprobs=1).aresult()).outputs[0]
    assert output.logprobs[0][first].logprob == pytest.approx(entry[first].logprob)
    assert len(output.logprobs) == output.length


async def test_a_first_token_that_ends_the_answer_is_all_there_is(llm: Any, decode_llm: Any) -> None:
    whole = await prefill(llm)
    end = whole.outputs[0].token_ids[0]
    await drain(decode_llm, whole)
    output = (await prefill(llm, end_id=end, ignore_eos=False)).outputs[0]
    assert output.finish_reason == "stop"
    assert list(output.token_ids) == []


async def test_a_phase_has_one_choice(llm: Any) -> None:
    """TensorRT-LLM's serve demands it, and its transceiver carries one beam."""
    params = sampling(n=2, best_of=2, temperature=1.0)
    with pytest.raises((ValueError, find("RequestError"))):
        await llm.generate_async(
            PROMPT, params, disaggregated_params=disaggregated(request_type="context_only")
        )


# -- generation_only


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}], ids=["greedy", "seeded"]
)
async def test_the_answer_is_that_of_one_engine(llm: Any, decode_llm: Any, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 20} | fields
    whole = await llm.generate_async(OTHER_PROMPT, sampling(**fields)).aresult()
    handoff = handoff_of(await prefill(llm, OTHER_PROMPT, **fields))
    split = await decode(decode_llm, handoff, OTHER_PROMPT, **fields).aresult()
    assert list(split.outputs[0].token_ids) == list(whole.outputs[0].token_ids)
    assert split.outputs[0].finish_reason == whole.outputs[0].finish_reason == "length"


async def test_the_first_token_is_repeated_first_and_counted(llm: Any, decode_llm: Any) -> None:
    result = await prefill(llm)
    updates = []
    async for update in decode(decode_llm, handoff_of(result), max_tokens=5, streaming=True):
        updates.append(list(update.outputs[0].token_ids))
    assert updates[0][0] == result.outputs[0].token_ids[0]
    assert len(updates[-1]) == 5
    assert update.outputs[0].finish_reason == "length"


async def test_a_max_tokens_of_one_gives_the_first_token_alone(llm: Any, decode_llm: Any) -> None:
    result = await prefill(llm)
    output = (await decode(decode_llm, handoff_of(result), max_tokens=1).aresult()).outputs[0]
    assert list(output.token_ids) == list(result.outputs[0].token_ids)
    assert output.finish_reason == "length"


async def test_cached_tokens_of_a_decode_are_those_of_the_engine(llm: Any, decode_llm: Any) -> None:
    """TensorRT-LLM counts the whole transferred prompt, which says nothing about what was saved, so that Dynamo
    works around it. The embedded engine counts what prefill found in its cache.
    """
    prompt = [33, *PROMPT]
    result = await prefill(llm, prompt)
    split = await decode(decode_llm, handoff_of(result), prompt).aresult()
    assert split.cached_tokens == (result.cached_tokens if IS_EMBEDDED else len(prompt))


@needs_a_model
async def test_a_guide_starts_at_the_first_token(llm: Any, decode_llm: Any) -> None:
    fields = {
        "guided_decoding": find("GuidedDecodingParams")(regex="(yes|no), [a-z]{3,9}!"),
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": False,
        "max_tokens": 40,
    }
    whole = (await llm.generate_async(PROMPT, sampling(**fields)).aresult()).outputs[0]
    handoff = handoff_of(await prefill(llm, **fields))
    split = (await decode(decode_llm, handoff, **fields).aresult()).outputs[0]
    assert list(split.token_ids) == list(whole.token_ids)
    assert split.text == whole.text
    assert split.finish_reason == "stop"


async def test_a_handoff_works_once(llm: Any, decode_llm: Any) -> None:
    """The sender has let go of the KV; what TensorRT-LLM calls this error is not known."""
    handoff = handoff_of(await prefill(llm))
    await decode(decode_llm, handoff)
    with pytest.raises((ValueError, find("RequestError"))):
        # Another prompt's prefix, so that no cache can help.
        await decode(decode_llm, handoff, [77, *PROMPT[1:]])


async def test_an_aborted_decode_leaves_a_working_engine(llm: Any, decode_llm: Any) -> None:
    result = decode(decode_llm, handoff_of(await prefill(llm)), max_tokens=300, streaming=True)
    async for update in result:
        if not update.finished:
            update.abort()
    assert result.outputs[0].finish_reason == "cancelled"
    await test_a_max_tokens_of_one_gives_the_first_token_alone(llm, decode_llm)


# -- both


@pytest.mark.parametrize("which", [0, 1])
async def test_a_whole_request_runs_on_any_worker(llms: tuple[Any, Any], which: int) -> None:
    params = disaggregated(request_type="context_and_generation")
    result = await llms[which].generate_async(PROMPT, sampling(), disaggregated_params=params).aresult()
    assert result.outputs[0].length == 8
    assert result.outputs[0].disaggregated_params is None


# -- generation first


def both_halves(llm: Any, request_id: int) -> tuple[Any, Any]:
    """(context, generation) parameters of one request."""
    style = find("DisaggScheduleStyle").GENERATION_FIRST
    endpoint = llm.disaggregated_params["ctx_info_endpoint"]
    context = disaggregated(request_type="context_only", disagg_request_id=request_id, schedule_style=style)
    generation = disaggregated(
        request_type="generation_only",
        ctx_request_id=request_id,
        disagg_request_id=request_id,
        ctx_info_endpoint=endpoint,
        schedule_style=style,
    )
    return context, generation


@pytest.mark.parametrize("num_tokens", [1, 8])
async def test_generation_first_answers_through_decode(llm: Any, decode_llm: Any, num_tokens: int) -> None:
    """No first token and no state are brought along; the first token comes with the KV."""
    context, generation = both_halves(llm, (1 << 42) + num_tokens)
    params = sampling(max_tokens=num_tokens)
    decoded = decode_llm.generate_async(PROMPT, params, disaggregated_params=generation, streaming=True)
    prefilled = llm.generate_async(PROMPT, params, disaggregated_params=context)
    await prefilled.aresult()
    await decoded.aresult()
    alone = await llm.generate_async(PROMPT, params).aresult()
    assert decoded.outputs[0].token_ids == alone.outputs[0].token_ids
    assert prefilled.outputs[0].token_ids == alone.outputs[0].token_ids[:1]


@pytest.mark.skipif(not IS_EMBEDDED, reason="TensorRT-LLM finds out later")
@pytest.mark.parametrize(
    "changes",
    [
        {"disagg_request_id": None},
        {"disagg_request_id": -1},
        {"ctx_info_endpoint": None},
        {"ctx_info_endpoint": ["tcp://a:1", "tcp://b:1"]},
        {"ctx_info_endpoint": "http://a:1"},
        {"ctx_info_endpoint": "tcp://a:99999"},
    ],
)
async def test_generation_first_without_its_meeting_place_is_refused(
    llm: Any, changes: dict[str, Any]
) -> None:
    _, generation = both_halves(llm, 7)
    with pytest.raises(ValueError, match="GENERATION_FIRST needs"):
        llm.generate_async(
            PROMPT, sampling(), disaggregated_params=dataclasses.replace(generation, **changes)
        )


@pytest.mark.skipif(not IS_EMBEDDED, reason="TensorRT-LLM serves images")
@pytest.mark.parametrize("field", ["multimodal_embedding_handles", "mrope_position_ids_handle"])
async def test_images_are_refused_by_name(llm: Any, field: str) -> None:
    params = disaggregated(
        request_type="context_only", **{field: [{}] if field.startswith("multi") else {"a": 1}}
    )
    with pytest.raises(NotImplementedError, match=field):
        llm.generate_async(PROMPT, sampling(), disaggregated_params=params)
