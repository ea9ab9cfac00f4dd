"""generate_async: its signature, what it takes and leaves alone, what it refuses at once, and what is asked twice."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from tests.conformance.api import (
    IS_EMBEDDED,
    MAX_BATCH_SIZE,
    MAX_SEQ_LEN,
    PROMPT,
    disaggregated,
    find,
    sampling,
)

RESULT = (
    "request_id",
    "prompt",
    "prompt_token_ids",
    "outputs",
    "context_logits",
    "finished",
    "cached_tokens",
    "decoding_iter",
    "avg_decoded_tokens_per_iter",
    "metrics_dict",
    "disaggregated_params",
)


async def tokens_of(result: Any) -> list[int]:
    return list((await result.aresult()).outputs[0].token_ids)


# -- shape


def test_llm_has_args_tokenizer_id_and_health_check(llm: Any) -> None:
    assert llm.args.max_seq_len == MAX_SEQ_LEN
    assert llm.args.enable_attention_dp is False
    assert llm.args.tensor_parallel_size == 1
    assert llm.tokenizer is not None
    assert isinstance(llm.llm_id, str)
    assert llm._check_health()


async def test_a_result_has_the_fields_of_tensorrt_llms(llm: Any) -> None:
    result = llm.generate_async(PROMPT, sampling(max_tokens=3))
    assert isinstance(result, find("RequestOutput"))
    assert isinstance(result, find("GenerationResult"))
    assert not result.finished
    await result
    assert all(hasattr(result, name) for name in RESULT)
    assert result.finished
    assert result.prompt_token_ids == PROMPT
    assert [output.index for output in result.outputs] == [0]
    assert isinstance(result.outputs[0], find("CompletionOutput"))
    assert result.disaggregated_params is None


async def test_requests_of_one_engine_have_different_ids(llm: Any) -> None:
    results = [llm.generate_async(PROMPT, sampling(max_tokens=1)) for _ in range(4)]
    for result in results:
        await result
    assert len({result.request_id for result in results}) == 4


# -- forms of a prompt


async def test_every_form_of_a_prompt_gives_the_same_answer(llm: Any) -> None:
    text = "a few words"
    token_ids = [int(t) for t in llm.tokenizer.encode(text)]
    forms: list[Any] = [
        text,
        token_ids,
        {"prompt": text},
        {"prompt_token_ids": token_ids},
        find("PreprocessedInputs")(numpy.asarray(token_ids, dtype=numpy.int32)),
    ]
    answers = []
    for form in forms:
        result = await llm.generate_async(form, sampling()).aresult()
        assert list(result.prompt_token_ids) == token_ids
        answers.append(list(result.outputs[0].token_ids))
    assert answers == [answers[0]] * len(forms)


async def test_default_sampling_is_greedy_and_32_tokens_at_most(llm: Any) -> None:
    answers = [await tokens_of(llm.generate_async(PROMPT)) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(answers[0]) <= 32


# -- refused at once


@pytest.mark.parametrize("inputs", [7, None, b"text", [5, "6"], (1.5, 2.5)], ids=repr)
async def test_a_prompt_of_another_type_is_a_type_error(llm: Any, inputs: Any) -> None:
    with pytest.raises(TypeError):
        llm.generate_async(inputs, sampling())


@pytest.mark.parametrize("priority", [-0.1, 1.1])
async def test_priorities_are_between_zero_and_one(llm: Any, priority: float) -> None:
    with pytest.raises(ValueError):
        llm.generate_async(PROMPT, sampling(), priority=priority)


async def test_more_choices_than_the_batch_holds_are_refused(llm: Any) -> None:
    with pytest.raises(ValueError):
        llm.generate_async(
            PROMPT, sampling(n=MAX_BATCH_SIZE + 1, best_of=MAX_BATCH_SIZE + 1, temperature=1.0)
        )


async def test_a_phase_without_its_handoff_fails(llm: Any) -> None:
    """The facts do not say whether TensorRT-LLM notices at once or when the engine looks for it."""
    params = disaggregated(request_type="generation_only")
    with pytest.raises((ValueError, find("RequestError"))):
        await llm.generate_async(PROMPT, sampling(), disaggregated_params=params)


async def test_prompt_beyond_max_seq_len_is_refused(llm: Any) -> None:
    """The facts do not say whether TensorRT-LLM notices at once or in the engine."""
    with pytest.raises((ValueError, find("RequestError"))):
        await llm.generate_async([5] * (MAX_SEQ_LEN + 1), sampling(max_tokens=1))


@pytest.mark.parametrize(
    "guide", [{"regex": "(a"}, {"json": '{"type": "no such type"}'}, {"grammar": "start: ("}], ids=str
)
async def test_a_bad_guide_costs_its_own_request(llm: Any, guide: dict[str, Any]) -> None:
    """The facts do not say whether TensorRT-LLM notices at once or in the engine."""
    params = sampling(guided_decoding=find("GuidedDecodingParams")(**guide))
    with pytest.raises((ValueError, find("RequestError"))):
        await llm.generate_async(PROMPT, params)
    assert len(await tokens_of(llm.generate_async(PROMPT, sampling()))) == 8


# -- requests


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
    """Also a context_only request leaves what it was given as it is."""
    params = sampling(max_tokens=6)
    first = await tokens_of(llm.generate_async(PROMPT, params))
    kind = disaggregated(request_type="context_only")
    prefilled = await llm.generate_async(PROMPT, params, disaggregated_params=kind).aresult()
    assert prefilled.outputs[0].length == 1
    prefilled.abort()
    assert params == sampling(max_tokens=6)
    assert await tokens_of(llm.generate_async(PROMPT, params)) == first


@pytest.mark.parametrize(
    "values", [{"temperature": 0.0, "top_p": 0.5}, {"top_k": 1, "temperature": 1.0}, {"top_p": None}], ids=str
)
async def test_greedy_spellings_give_the_same_tokens(llm: Any, values: dict[str, Any]) -> None:
    greedy = await tokens_of(llm.generate_async(PROMPT, sampling()))
    assert await tokens_of(llm.generate_async(PROMPT, sampling(**values))) == greedy


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
