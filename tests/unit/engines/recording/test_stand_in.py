"""The recording stand-in for tensorrt_llm: behaves as the facts say, complains as TensorRT-LLM would."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trtllm_disagg.engines.recording.llm import (
    LLM,
    DisaggregatedParams,
    RequestError,
    RequestOutput,
    SamplingParams,
    Script,
)
from trtllm_disagg.engines.recording.result import EOS_TOKEN

PROMPT = [11, 12, 13]
NIXL = {"backend": "NIXL"}


def make(**kwargs: Any) -> LLM:
    return LLM("org/model", **{"cache_transceiver_config": NIXL} | kwargs)


async def prefill(llm: LLM, **sampling: Any) -> RequestOutput:
    params = DisaggregatedParams(request_type="context_only")
    return await llm.generate_async(PROMPT, SamplingParams(**sampling), disaggregated_params=params).aresult()


def handoff_of(result: RequestOutput) -> DisaggregatedParams:
    handoff = result.outputs[0].disaggregated_params
    assert handoff is not None
    return dataclasses.replace(handoff, request_type="generation_only")


# -- names and signatures


def test_an_unknown_keyword_is_refused() -> None:
    unknown: list[dict[str, Any]] = [{"max_num_token": 1}, {"embedded": {}}, {"kv_cache_config": {"xyz": 1}}]
    for kwargs in unknown:
        with pytest.raises(ValueError):
            LLM("m", **kwargs)
    with pytest.raises(ValueError, match="SHARED_MEMORY"):
        LLM("m", cache_transceiver_config={"backend": "SHARED_MEMORY"})
    with pytest.raises(TypeError):
        make().generate_async(PROMPT, stream=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(max_token=1)  # type: ignore[call-arg]


# -- answers


async def test_kv_is_fetched_once_and_only_for_its_prompt() -> None:
    handoff = handoff_of(await prefill(make()))
    for prompt in ([1, 2, 3], PROMPT):
        with pytest.raises(RequestError, match="kv cache transfer"):
            await make().generate_async(prompt, disaggregated_params=handoff).aresult()


async def test_choices_of_one_request_grow_by_turns() -> None:
    result = make().generate_async(PROMPT, SamplingParams(n=2, max_tokens=2), streaming=True)
    lengths = [tuple(output.length for output in partial.outputs) async for partial in result]
    assert lengths == [(1, 0), (1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize(
    ("sampling", "tokens", "finish_reason", "stop_reason"),
    [
        ({}, [5, 6], "stop", None),
        ({"ignore_eos": True}, [5, 6, EOS_TOKEN, 7], "length", None),
        ({"stop_token_ids": [6]}, [5], "stop", 6),
        ({"stop_token_ids": [6], "include_stop_str_in_output": True}, [5, 6], "stop", 6),
        # `min_tokens` puts off the end token only, as in TensorRT-LLM's sampler.
        ({"stop_token_ids": [6], "min_tokens": 3}, [5], "stop", 6),
        ({"min_tokens": 3}, [5, 6, EOS_TOKEN, 7], "length", None),
        ({"max_tokens": 1}, [5], "length", None),
        ({"end_id": 5}, [], "stop", None),
    ],
)
async def test_answer_ends_by_its_sampling_params(
    sampling: dict[str, Any], tokens: list[int], finish_reason: str, stop_reason: int | None
) -> None:
    llm = make()
    llm.scripts.append(Script(tokens=[5, 6, EOS_TOKEN, 7]))
    output = (await llm.generate_async(PROMPT, SamplingParams(**sampling)).aresult()).outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        tokens,
        finish_reason,
        stop_reason,
    )


# -- refusals


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"inputs": 5}, TypeError),
        ({"inputs": [1, "2"]}, TypeError),
        ({"inputs": {"images": []}}, TypeError),
        ({"inputs": PROMPT, "priority": 2.0}, ValueError),
        ({"inputs": PROMPT, "sampling_params": SamplingParams(n=9)}, ValueError),
        ({"inputs": PROMPT, "sampling_params": {"n": 1}}, TypeError),
        ({"inputs": [1] * 64}, ValueError),
        ({"inputs": PROMPT, "disaggregated_params": {}}, TypeError),
    ],
)
def test_a_bad_request_is_refused_at_once(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        make(max_batch_size=8, max_seq_len=64).generate_async(**arguments)


def test_a_split_request_needs_a_transceiver_and_one_choice() -> None:
    split = DisaggregatedParams(request_type="context_only")
    with pytest.raises(ValueError, match=r"cache_transceiver_config\.backend"):
        LLM("m").generate_async(PROMPT, disaggregated_params=split)
    with pytest.raises(ValueError, match="one choice"):
        make().generate_async(PROMPT, SamplingParams(n=2), disaggregated_params=split)


# -- an engine that misbehaves


async def test_kv_of_a_decode_that_is_aborted_too_early_stays_behind() -> None:
    """As TensorRT-LLM has done it (Dynamo #7489)."""
    llm = make()
    params = DisaggregatedParams(request_type="context_only")
    made = (await llm.generate_async(PROMPT, disaggregated_params=params).aresult()).outputs[0]
    assert made.disaggregated_params is not None
    made.disaggregated_params.request_type = "generation_only"
    result = llm.generate_async(PROMPT, disaggregated_params=made.disaggregated_params, streaming=True)
    result.abort()
    await result.aresult()
    assert result.aborts == [0]
    assert result.outputs[0].finish_reason == "cancelled"
    assert len(LLM.kv_store) == 1
