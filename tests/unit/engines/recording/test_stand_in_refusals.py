"""What the recording stand-in for tensorrt_llm refuses, and how it plays an engine that misbehaves."""

from __future__ import annotations

from typing import Any

import pytest

from trtllm_disagg.engines.recording.llm import (
    LLM,
    DisaggregatedParams,
    RequestError,
    SamplingParams,
    Script,
)

PROMPT = [11, 12, 13]


def make(**kwargs: Any) -> LLM:
    return LLM("org/model", **{"cache_transceiver_config": {"backend": "NIXL"}} | kwargs)


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


def test_request_after_shutdown_is_refused() -> None:
    llm = make()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async(PROMPT)


# -- events and statistics


async def test_events_and_stats_are_drained_once() -> None:
    llm = make(kv_cache_config={"event_buffer_max_size": 8}, enable_iter_perf_stats=True)
    llm.kv_cache_events = [{"event_id": 0}, {"event_id": 1}]
    llm.stats = [{"iter": 0}]
    assert [event["event_id"] async for event in llm.get_kv_cache_events_async(timeout=0)] == [0, 1]
    assert [event async for event in llm.get_kv_cache_events_async(timeout=0)] == []
    assert [stat["iter"] async for stat in llm.get_stats_async(timeout=0)] == [0]
    assert llm.get_kv_cache_capacity() == {"maxNumBlocks": 1024, "tokensPerBlock": 32}


# -- an engine that misbehaves


async def test_scripted_finish_reason_is_returned() -> None:
    llm = make()
    llm.scripts.append(Script(ends_with="timeout"))
    result = await llm.generate_async(PROMPT, SamplingParams(max_tokens=2)).aresult()
    assert result.outputs[0].finish_reason == "timeout"
    assert result.outputs[0].length == 2


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


async def test_the_python_transceiver_names_an_endpoint() -> None:
    llm = make(cache_transceiver_config={"backend": "NIXL", "transceiver_runtime": "PYTHON"})
    params = DisaggregatedParams(request_type="context_only")
    made = (await llm.generate_async(PROMPT, disaggregated_params=params).aresult()).outputs[0]
    handoff = made.disaggregated_params
    assert handoff is not None
    assert handoff.opaque_state is None
    handoff.request_type = "generation_only"
    await llm.generate_async(PROMPT, SamplingParams(max_tokens=2), disaggregated_params=handoff).aresult()
    with pytest.raises(RequestError):
        await llm.generate_async(PROMPT, disaggregated_params=handoff).aresult()


def test_an_engine_that_is_shut_down_is_not_healthy() -> None:
    llm = make()
    assert llm._check_health()
    llm.shutdown()
    assert not llm._check_health()
