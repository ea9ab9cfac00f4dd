"""Each hard edge of TensorRT-LLM in the stand-in, turned on, beside what it does turned off."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.support.mounted_recording import mounted_recording_llm
from trtllm_disagg.engines.recording.hard_edges import (
    FORGIVING,
    GENERATION_TRANSFER_ERROR,
    PESSIMISTIC,
    EngineDeadError,
    EventLoopShutdownError,
    HardEdges,
)
from trtllm_disagg.engines.recording.llm import (
    LLM,
    DisaggregatedParams,
    DisaggScheduleStyle,
    Logprob,
    RequestError,
    RequestOutput,
    SamplingParams,
    Script,
)
from trtllm_disagg.engines.recording.result import EOS_TOKEN, scripted_token

PROMPT = [11, 12, 13]
BOTH = pytest.mark.parametrize("edges", [PESSIMISTIC, FORGIVING], ids=["hard", "soft"])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with mounted_recording_llm():
        yield


def make(edges: HardEdges = PESSIMISTIC, transceiver: dict[str, Any] | None = None, **kwargs: Any) -> LLM:
    LLM.next_edges = edges
    config = {"backend": "NIXL", "kv_transfer_timeout_ms": 60000} | (transceiver or {})
    return LLM("org/model", cache_transceiver_config=config, **kwargs)


async def prefill(llm: LLM, **params: Any) -> RequestOutput:
    context = DisaggregatedParams(request_type="context_only", **params)
    return await llm.generate_async(PROMPT, disaggregated_params=context).aresult()


def handoff_of(result: RequestOutput) -> DisaggregatedParams:
    made = result.outputs[0].disaggregated_params
    assert made is not None
    return dataclasses.replace(made, request_type="generation_only")


async def hangs(result: RequestOutput) -> bool:
    done, waiting = await asyncio.wait({asyncio.ensure_future(result.aresult())}, timeout=0.05)
    for task in waiting:
        task.cancel()
    return not done


def test_pessimistic_sets_every_hard_edge_and_forgiving_none() -> None:
    assert set(dataclasses.asdict(PESSIMISTIC).values()) == {True}
    assert set(dataclasses.asdict(FORGIVING).values()) == {False}


# -- sampling parameters


@BOTH
async def test_without_a_tokenizer_a_request_has_to_name_its_end(edges: HardEdges) -> None:
    llm = make(edges, skip_tokenizer_init=True)
    llm.generate_async(PROMPT, SamplingParams(end_id=2)).abort()
    if edges is FORGIVING:
        llm.generate_async(PROMPT, SamplingParams()).abort()
        return
    with pytest.raises(ValueError, match="end_id"):
        llm.generate_async(PROMPT, SamplingParams())
    make(edges).generate_async(PROMPT, SamplingParams()).abort()


@BOTH
async def test_the_callers_sampling_parameters_are_changed(edges: HardEdges) -> None:
    llm, given = make(edges), SamplingParams(max_tokens=7)
    llm.generate_async(
        PROMPT, given, disaggregated_params=DisaggregatedParams(request_type="context_only")
    ).abort()
    after = (given.end_id, given.pad_id, given.max_tokens)
    assert after == ((EOS_TOKEN, EOS_TOKEN, 1) if edges is PESSIMISTIC else (None, None, 7))
    assert llm.calls_of("generate_async")[0]["sampling_params"] == SamplingParams(max_tokens=7)


# -- events and statistics


@pytest.mark.parametrize("method", ["get_stats_async", "get_kv_cache_events_async"])
@pytest.mark.parametrize("timeout", [0.0, 0.15])
async def test_statistics_and_events_calls_block_until_their_timeout(method: str, timeout: float) -> None:
    llm = make(enable_iter_perf_stats=True, kv_cache_config={"event_buffer_max_size": 8})
    started = time.monotonic()
    news = getattr(llm, method)(timeout=timeout)
    blocked = time.monotonic() - started
    assert [item async for item in news] == []
    assert timeout <= blocked < timeout + 2
    assert timeout <= time.monotonic() - started - blocked < timeout + 2


async def test_statistics_call_returns_with_the_first_statistic() -> None:
    llm = make(enable_iter_perf_stats=True)
    later = threading.Timer(0.05, llm.stats.append, [{"iter": 3}])
    later.start()
    started = time.monotonic()
    news = llm.get_stats_async(timeout=20)
    assert time.monotonic() - started < 2
    assert await anext(news) == {"iter": 3}
    later.join()


async def test_statistic_is_given_to_one_reader_only() -> None:
    llm = make(enable_iter_perf_stats=True)
    llm.stats = [{"iter": 0}, {"iter": 1}]
    first, second = llm.get_stats_async(timeout=0), llm.get_stats_async(timeout=0)
    assert await anext(first) == {"iter": 0}
    assert [stat async for stat in second] == [{"iter": 1}]
    assert [stat async for stat in first] == []


KINDS = pytest.mark.parametrize("method", ["get_stats", "get_kv_cache_events"])


@KINDS
async def test_statistics_and_events_that_are_off_are_empty(method: str) -> None:
    llm = make()
    llm.stats = llm.kv_cache_events = [{"iter": 0}]
    assert [item async for item in getattr(llm, f"{method}_async")(timeout=0)] == []
    assert getattr(llm, method)(timeout=0) == []
    for name in (method, f"{method}_async"):
        with pytest.raises(RuntimeError, match="need"):
            getattr(make(FORGIVING), name)()


@KINDS
@BOTH
def test_an_iterator_lives_with_the_loop_of_its_first_caller_and_lists_go_on(
    edges: HardEdges, method: str
) -> None:
    llm = make(edges, enable_iter_perf_stats=True, kv_cache_config={"event_buffer_max_size": 8})
    made = llm.stats if method == "get_stats" else llm.kv_cache_events
    records = [{"iter": number} for number in range(20)]

    async def read() -> list[dict[str, Any]]:
        return [item async for item in getattr(llm, f"{method}_async")(timeout=0)]

    made += records
    assert asyncio.run(read()) == records
    made += records
    if edges is PESSIMISTIC:
        with pytest.raises(EventLoopShutdownError):
            asyncio.run(read())
        assert asyncio.run(read()) == records[:1]
    else:
        assert asyncio.run(read()) == records
    made += records
    assert getattr(llm, method)(timeout=0) == records


async def test_another_loop_cannot_wait_at_the_iterator_of_the_first_one() -> None:
    llm = make(enable_iter_perf_stats=True)
    llm.get_stats_async(timeout=0)

    async def read() -> list[dict[str, Any]]:
        return [item async for item in llm.get_stats_async(timeout=0.01)]

    with pytest.raises(RuntimeError, match="bound to a different event loop"):
        await asyncio.to_thread(asyncio.run, read())


@KINDS
@pytest.mark.parametrize("timeout", [0.0, 0.15])
def test_the_call_that_returns_a_list_blocks_until_its_timeout(method: str, timeout: float) -> None:
    llm = make(enable_iter_perf_stats=True, kv_cache_config={"event_buffer_max_size": 8})
    started = time.monotonic()
    assert getattr(llm, method)(timeout=timeout) == []
    assert timeout <= time.monotonic() - started < timeout + 2


# -- KV that no decode fetches


@BOTH
async def test_an_abort_after_the_end_frees_nothing(edges: HardEdges) -> None:
    llm = make(edges)
    result = await prefill(llm)
    assert (result.outputs[0].finish_reason, llm.held_contexts) == ("length", 1)
    result.abort()
    assert llm.held_contexts == (edges is PESSIMISTIC)


async def test_kv_is_held_until_the_transfer_timeout() -> None:
    llm = make(transceiver={"kv_transfer_timeout_ms": 1})
    handoff = handoff_of(await prefill(llm))
    await asyncio.sleep(0.01)
    assert llm.held_contexts == 0
    with pytest.raises(RequestError, match=GENERATION_TRANSFER_ERROR):
        await make().generate_async(PROMPT, disaggregated_params=handoff).aresult()


async def test_decode_frees_only_its_senders_context() -> None:
    first, second = make(), make()
    handoff = handoff_of(await prefill(first))
    await prefill(second)
    await make().generate_async(PROMPT, disaggregated_params=handoff).aresult()
    assert (first.held_contexts, second.held_contexts) == (0, 1)


async def test_fetched_kv_is_reported_free_only_in_the_next_requests_step() -> None:
    llm = make(enable_iter_perf_stats=True)

    async def used() -> list[int]:
        return [stat["kvCacheStats"]["usedNumBlocks"] async for stat in llm.get_stats_async(timeout=0)]

    handoff = handoff_of(await prefill(llm))
    await make().generate_async(PROMPT, disaggregated_params=handoff).aresult()
    assert await used() == [1]
    assert await used() == []
    await llm.generate_async(PROMPT, SamplingParams(max_tokens=1)).aresult()
    assert await used() == [0]


async def test_a_prefill_that_stops_or_is_aborted_holds_nothing() -> None:
    llm = make()
    llm.scripts.append(Script(tokens=[EOS_TOKEN]))
    assert (await prefill(llm)).outputs[0].finish_reason == "stop"
    context = DisaggregatedParams(request_type="context_only")
    running = llm.generate_async(PROMPT, disaggregated_params=context)
    running.abort()
    assert (await running.aresult()).outputs[0].finish_reason == "cancelled"
    assert llm.held_contexts == 0


# -- errors


@BOTH
async def test_result_that_raised_is_not_finished_with_pessimistic_edges(edges: HardEdges) -> None:
    llm = make(edges)
    llm.scripts.append(Script(error=RequestError(GENERATION_TRANSFER_ERROR)))
    result = llm.generate_async(PROMPT)
    with pytest.raises(RequestError) as raised:
        await result.aresult()
    assert not hasattr(raised.value, "category")
    assert result.finished is (edges is FORGIVING)
    assert await hangs(result) is (edges is PESSIMISTIC)


@BOTH
def test_an_abort_blocks_its_thread_once_the_engine_is_dead(edges: HardEdges) -> None:
    llm = make(edges)
    result = llm.generate_async(PROMPT)
    llm.die()
    aborting = threading.Thread(target=result.abort)
    aborting.start()
    aborting.join(0.1 if edges is PESSIMISTIC else 30)
    assert aborting.is_alive() is (edges is PESSIMISTIC)
    llm.may_abort.set()
    aborting.join()


@pytest.mark.parametrize("chunked", [True, False])
async def test_prompt_above_max_num_tokens_is_refused_without_chunked_prefill(chunked: bool) -> None:
    llm = make(max_num_tokens=2, max_batch_size=2, enable_chunked_prefill=chunked)
    if chunked:
        await llm.generate_async(PROMPT).aresult()
        return
    with pytest.raises(RequestError, match=r"prompt length \(3\.0\).*max_num_tokens \(2\)"):
        llm.generate_async(PROMPT)
    # No prefill runs for a decode.
    handoff = handoff_of(await prefill(make()))
    await llm.generate_async(PROMPT, disaggregated_params=handoff).aresult()


async def test_a_prompt_of_max_seq_len_fails_in_the_stream() -> None:
    result = make(max_seq_len=3).generate_async(PROMPT)
    with pytest.raises(RequestError, match=r"default_max_tokens` \(0\) must be greater than 0"):
        await result.aresult()
    with pytest.raises(ValueError, match="exceeds max_seq_len"):
        make(FORGIVING, max_seq_len=3).generate_async(PROMPT)


# -- the Python transceiver

PYTHON = {"transceiver_runtime": "PYTHON"}


async def test_an_endpoint_is_a_string_and_a_list_ends_the_engine() -> None:
    handoff = handoff_of(await prefill(make(transceiver=PYTHON)))
    assert isinstance(handoff.ctx_info_endpoint, str)
    several = dataclasses.replace(handoff, ctx_info_endpoint=[handoff.ctx_info_endpoint])
    llm = make(transceiver=PYTHON)
    with pytest.raises(TypeError, match="ctx_info_endpoint is a str or None"):
        llm.generate_async(PROMPT, disaggregated_params=several)
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async(PROMPT)
    named = dataclasses.replace(handoff, disagg_request_id=handoff.ctx_request_id)
    await make(transceiver=PYTHON).generate_async(PROMPT, disaggregated_params=named).aresult()


@BOTH
async def test_kv_is_found_by_an_id_that_the_answer_to_the_prefill_has_not(edges: HardEdges) -> None:
    handoff = handoff_of(await prefill(make(edges, PYTHON), disagg_request_id=1 << 41))
    assert handoff.ctx_request_id == 1 << 41
    assert handoff.disagg_request_id == (None if edges is PESSIMISTIC else 1 << 41)
    fetched = make(edges, PYTHON).generate_async(PROMPT, disaggregated_params=handoff)
    if edges is PESSIMISTIC:
        with pytest.raises(RequestError, match=GENERATION_TRANSFER_ERROR):
            await fetched.aresult()
    else:
        await fetched.aresult()


async def test_attention_dp_needs_the_rank_of_the_context() -> None:
    handoff = handoff_of(await prefill(make(enable_attention_dp=True)))
    assert handoff.ctx_dp_rank == 0
    nameless = dataclasses.replace(handoff, ctx_dp_rank=None)
    for params, fails in ((nameless, True), (handoff, False)):
        result = make(enable_attention_dp=True).generate_async(PROMPT, disaggregated_params=params)
        if fails:
            with pytest.raises(RequestError, match="ctx_dp_rank is None"):
                await result.aresult()
        else:
            await result.aresult()


async def test_generation_first_phases_find_each_other_by_request_id() -> None:
    context, generation = make(transceiver=PYTHON), make(transceiver=PYTHON)
    assert make().disaggregated_params == {}
    style: dict[str, Any] = {"disagg_request_id": 5, "schedule_style": DisaggScheduleStyle.GENERATION_FIRST}
    params = [DisaggregatedParams(request_type=kind, **style) for kind in ("context_only", "generation_only")]
    sampling = [SamplingParams(max_tokens=2) for _ in params]
    first = context.generate_async(PROMPT, sampling[0], disaggregated_params=params[0])
    assert await hangs(first)
    params[1].ctx_info_endpoint = context.disaggregated_params["ctx_info_endpoint"][0]
    second = generation.generate_async(PROMPT, sampling[1], disaggregated_params=params[1])
    await asyncio.gather(first.aresult(), second.aresult())
    assert second.outputs[0].token_ids == [scripted_token(PROMPT, position) for position in range(2)]
    assert context.held_contexts == 0


# -- an engine that ends


@BOTH
async def test_a_dead_engine_hangs_its_requests_and_refuses_new_ones(edges: HardEdges) -> None:
    llm = make(edges)
    running = llm.generate_async(PROMPT, streaming=True)
    await anext(running)
    llm.die()
    assert await hangs(running)
    with pytest.raises(RuntimeError):
        llm.generate_async(PROMPT)
    if edges is PESSIMISTIC:
        with pytest.raises(EngineDeadError):
            llm._check_health()
    else:
        assert not llm._check_health()


# -- versions


@pytest.mark.parametrize(
    ("version", "arguments"),
    [
        ("1.3.0rc29", (3, 4)),
        ("1.3.0rc22", (3, 4)),
        ("1.3.0rc21", (196,)),
        ("1.3.0rc5.post1", (196,)),
        ("1.2.1", None),
    ],
)
def test_ids_are_made_as_the_version_makes_them(version: str, arguments: tuple[int, ...] | None) -> None:
    with mounted_recording_llm(version=version) as module:
        assert module.__version__ == version
        utils: ModuleType = module.llmapi.disagg_utils
        if arguments is None:
            assert not hasattr(utils, "get_global_disagg_request_id")
            return
        made: int = utils.get_global_disagg_request_id(*arguments)
        assert made >> 10 & 0x3FFF == 3 << 6 | 4
        if len(arguments) == 1:
            with pytest.raises(TypeError):
                utils.get_global_disagg_request_id(3, 4)
            with pytest.raises(ValueError):
                utils.get_global_disagg_request_id(1024)


@BOTH
async def test_a_decode_that_may_make_one_token_makes_two(edges: HardEdges) -> None:
    handoff = handoff_of(await prefill(make(edges)))
    handoff.request_type = "generation_only"
    decode = make(edges).generate_async(PROMPT, SamplingParams(max_tokens=1), disaggregated_params=handoff)
    await decode.aresult()
    assert len(decode.outputs[0].token_ids) == (2 if edges.decodes_past_a_limit_of_one else 1)


# -- log probabilities of a prompt


@BOTH
async def test_an_abort_before_logprobs_of_a_prompt_damages_other_answers(edges: HardEdges) -> None:
    llm = make(edges)
    others = [llm.generate_async(PROMPT, SamplingParams(max_tokens=3), streaming=True) for _ in range(2)]
    for other in others:
        await anext(other)
    asking = llm.generate_async(PROMPT, SamplingParams(prompt_logprobs=0))
    asking.abort()
    first, second = await asyncio.gather(*(each.aresult() for each in others), return_exceptions=True)
    whole = [scripted_token(PROMPT, position) for position in range(3)]
    assert isinstance(first, RequestError) is edges.fails_others_at_aborted_prompts
    assert isinstance(second, RequestOutput)
    assert (second.outputs[0].token_ids == whole) is not edges.fails_others_at_aborted_prompts
    assert await hangs(asking) is edges.fails_others_at_aborted_prompts


@BOTH
async def test_logprobs_behind_a_cached_prefix_are_of_other_tokens(edges: HardEdges) -> None:
    llm = make(edges, kv_cache_config={"tokens_per_block": 2})
    asking = SamplingParams(max_tokens=1, prompt_logprobs=0)
    first, second, salted = [
        (await llm.generate_async(PROMPT, asking, cache_salt=salt).aresult()).outputs[0].prompt_logprobs
        for salt in ("a", "a", "b")
    ]
    assert [[(token, entry.logprob)] for each in first for token, entry in each.items()] == [
        [(12, 0.0)],
        [(13, -1.0)],
        [(scripted_token(PROMPT, 0), -2.0)],
    ]
    assert salted == first
    expected = [{12: Logprob(-2.0, 1)}] if edges.counts_logprobs_behind_cached else first
    assert second == expected
