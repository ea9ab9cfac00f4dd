"""Requests: what goes along with a prompt, what is left alone, and what is asked twice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.api import IS_EMBEDDED, PROMPT, disaggregated, find, sampling


async def tokens_of(result: Any) -> list[int]:
    return list((await result.aresult()).outputs[0].token_ids)


@pytest.mark.parametrize(
    "more",
    [
        {"trace_headers": {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}},
        {"scheduling_params": ("attention_dp_rank", 0)},
        {"priority": 0.0},
        {"priority": 1.0},
        {"kv_cache_retention_config": None, "conversation_params": None, "_postproc_params": None},
    ],
    ids=lambda more: "-".join(more),
)
async def test_what_dynamo_sends_along_changes_no_answer(llm: Any, more: dict[str, Any]) -> None:
    if "scheduling_params" in more:
        more = {"scheduling_params": find("SchedulingParams")(attention_dp_rank=0, attention_dp_relax=False)}
    alone = await tokens_of(llm.generate_async(PROMPT, sampling()))
    assert await tokens_of(llm.generate_async(PROMPT, sampling(), **more)) == alone


async def test_a_new_output_is_empty(llm: Any) -> None:
    result = llm.generate_async(PROMPT, sampling(max_tokens=2), streaming=True)
    output = result.outputs[0]
    assert not output.token_ids
    assert not output.logprobs
    assert not output.prompt_logprobs
    assert (output.length, output.text, output.finish_reason) == (0, "", None)
    await result


async def test_iterating_a_finished_result_yields_nothing(llm: Any) -> None:
    result = llm.generate_async(PROMPT, sampling(max_tokens=3), streaming=True)
    first = [list(update.outputs[0].token_ids) async for update in result]
    assert result.finished
    assert [update async for update in result] == []
    assert (await result.aresult()).outputs[0].token_ids == first[-1]


async def test_an_abort_may_come_at_any_time_and_more_than_once(llm: Any) -> None:
    early = llm.generate_async(PROMPT, sampling(max_tokens=300))
    for _ in range(2):
        early.abort()
    await early.aresult()
    assert early.outputs[0].finish_reason == "cancelled"
    late = llm.generate_async(PROMPT, sampling(max_tokens=3))
    tokens = await tokens_of(late)
    late.abort()
    assert (late.outputs[0].finish_reason, len(tokens)) == ("length", 3)
    assert len(await tokens_of(llm.generate_async(PROMPT, sampling()))) == 8


async def test_a_reader_that_left_blocks_no_other_request(llm: Any) -> None:
    """Dynamo stops iterating when its client is gone."""
    left = llm.generate_async(PROMPT, sampling(max_tokens=60), streaming=True)
    await anext(left)
    assert len(await tokens_of(llm.generate_async(PROMPT, sampling()))) == 8
    left.abort()


async def test_parameters_made_once_serve_many(llm: Any) -> None:
    """A context_only request has one token, and leaves what it was given as it is."""
    params = sampling(max_tokens=6)
    first = await tokens_of(llm.generate_async(PROMPT, params))
    kind = disaggregated(request_type="context_only")
    prefilled = await llm.generate_async(PROMPT, params, disaggregated_params=kind).aresult()
    assert prefilled.outputs[0].length == 1
    prefilled.abort()
    assert params.max_tokens == 6
    assert await tokens_of(llm.generate_async(PROMPT, params)) == first


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.0, "top_p": 0.5}, {"top_k": 1, "temperature": 1.0}, {"top_p": None}],
    ids=str,
)
async def test_greedy_spellings_give_the_same_tokens(llm: Any, values: dict[str, Any]) -> None:
    greedy = await tokens_of(llm.generate_async(PROMPT, sampling()))
    assert await tokens_of(llm.generate_async(PROMPT, sampling(**values))) == greedy


async def test_first_of_several_stop_tokens_ends_the_answer(llm: Any) -> None:
    """The one that comes first ends the answer, and is named."""
    whole = await tokens_of(llm.generate_async(PROMPT, sampling(max_tokens=12)))
    first = min((whole[4], whole[9]), key=whole.index)
    params = sampling(max_tokens=12, stop_token_ids=[whole[4], whole[9]], ignore_eos=False, end_id=-1)
    output = (await llm.generate_async(PROMPT, params).aresult()).outputs[0]
    assert list(output.token_ids) == whole[: whole.index(first)]
    assert (output.finish_reason, output.stop_reason) == ("stop", first)


@pytest.mark.skipif(not IS_EMBEDDED, reason="TensorRT-LLM serves them")
@pytest.mark.parametrize(
    "values",
    [
        {"use_beam_search": True},
        {"best_of": 2},
        {"embedding_bias": [0.0]},
        {"logits_processor": object()},
        {"apply_batched_logits_processor": True},
        {"no_repeat_ngram_size": 2},
        {"top_p_decay": 0.5},
        {"top_p_min": 0.5},
        {"top_p_reset_ids": 5},
        {"return_context_logits": True},
        {"return_generation_logits": True},
        {"truncate_prompt_tokens": 5},
        {"thinking_token_budget": 0},
    ],
    ids=" ".join,
)
async def test_unserved_sampling_option_is_refused_by_name(llm: Any, values: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(values))):
        llm.generate_async(PROMPT, sampling(**values))
