"""generate_async: its signature, what it takes, and what it refuses at once."""

from __future__ import annotations

import inspect
from typing import Any

import numpy
import pytest

from tests.conformance.api import MAX_BATCH_SIZE, MAX_SEQ_LEN, PROMPT, disaggregated, find, sampling

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


def test_generate_async_is_no_coroutine_function() -> None:
    assert not inspect.iscoroutinefunction(find("LLM").generate_async)


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


async def test_the_callers_parameters_stay_as_they_are(llm: Any) -> None:
    params = sampling(max_tokens=6)
    await llm.generate_async(PROMPT, params)
    assert params == sampling(max_tokens=6)
