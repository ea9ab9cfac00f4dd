"""What an engine tells the router and of a request, and how it ends."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from tests.conformance.api import (
    IS_EMBEDDED,
    MAX_BATCH_SIZE,
    MAX_SEQ_LEN,
    OTHER_PROMPT,
    PROMPT,
    TOKENS_PER_BLOCK,
    find,
    needs_a_model,
    sampling,
)
from tests.conformance.conftest import MakeLlm
from tests.conformance.test_handoffs import decode, handoff_of, prefill

#: Of one iteration, whatever runs.
STATS = {
    "timestamp": str,
    "iter": int,
    "iterLatencyMS": float,
    "numNewActiveRequests": int,
    "numActiveRequests": int,
    "numQueuedRequests": int,
    "numCompletedRequests": int,
    "maxNumActiveRequests": int,
    "maxBatchSizeStatic": int,
    "maxNumTokensStatic": int,
}
KV_CACHE_STATS = {
    "maxNumBlocks": int,
    "freeNumBlocks": int,
    "usedNumBlocks": int,
    "tokensPerBlock": int,
    "allocTotalBlocks": int,
    "allocNewBlocks": int,
    "reusedBlocks": int,
    "missedBlocks": int,
    "cacheHitRate": float,
}
#: Dynamo's forward-pass metrics need all from numCtxKvTokens on.
INFLIGHT_STATS = {
    "numScheduledRequests": int,
    "numContextRequests": int,
    "numGenRequests": int,
    "numPausedRequests": int,
    "numCtxTokens": int,
    "microBatchId": int,
    "avgNumDecodedTokensPerIter": float,
    "numCtxKvTokens": int,
    "numGenKvTokens": int,
    "numQueuedContextRequests": int,
    "numQueuedCtxTokens": int,
    "numQueuedGenRequests": int,
    "numQueuedGenKvTokens": int,
    "numPausedKvTokens": int,
}


async def drain(records: Any) -> list[dict[str, Any]]:
    return [record if isinstance(record, dict) else json.loads(record) async for record in records]


async def events_of(llm: Any, prompt: list[int], **more: Any) -> list[dict[str, Any]]:
    """Of one request, after those of all before it."""
    await drain(llm.get_kv_cache_events_async(timeout=0.5))
    await llm.generate_async(prompt, sampling(max_tokens=1), **more)
    return await drain(llm.get_kv_cache_events_async(timeout=5))


def stored(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole blocks, each with its parent's hash; TensorRT-LLM tells of parts of blocks, too."""
    blocks = []
    for event in events:
        if event["data"]["type"] != "stored":
            continue
        parent = event["data"]["parent_hash"]
        for block in event["data"]["blocks"]:
            assert block["type"] == "stored_block"
            assert 0 < len(block["tokens"]) <= TOKENS_PER_BLOCK
            if len(block["tokens"]) == TOKENS_PER_BLOCK:
                blocks.append(block | {"parent": parent})
            parent = block["block_hash"]
    return blocks


# -- KV events


async def test_events_are_numbered_without_gaps(llm: Any) -> None:
    events = await events_of(llm, [41, *PROMPT])
    events += await events_of(llm, [42, *PROMPT])
    ids = [event["event_id"] for event in events]
    assert all(isinstance(event["window_size"], int) for event in events)
    assert all(isinstance(event["data"], dict) for event in events)
    assert ids == sorted(set(ids))


async def test_full_blocks_of_a_prompt_are_stored_in_a_chain(llm: Any) -> None:
    prompt = [43, *PROMPT]
    blocks = stored(await events_of(llm, prompt))
    assert len(blocks) == len(prompt) // TOKENS_PER_BLOCK
    assert blocks[0]["parent"] is None
    assert blocks[1]["parent"] == blocks[0]["block_hash"]
    tokens = [token for block in blocks for token in block["tokens"]]
    assert [token["token_id"] for token in tokens] == prompt[: len(tokens)]
    for block in blocks:
        assert 0 <= block["block_hash"] < 2**64
        assert block["cache_level"] == 0
        assert isinstance(block["priority"], int)
        assert {(token["type"], token["token_extra_id"]) for token in block["tokens"]} == {
            ("unique_token", 0)
        }


async def test_a_known_prefix_is_not_stored_again(llm: Any) -> None:
    prompt = [44, *PROMPT]
    first = stored(await events_of(llm, prompt))
    longer = stored(
        await events_of(llm, prompt[: 2 * TOKENS_PER_BLOCK] + list(range(5, 5 + TOKENS_PER_BLOCK)))
    )
    assert [block["parent"] for block in longer] == [first[1]["block_hash"]]


async def test_stored_event_of_a_salted_block_has_its_salt(llm: Any) -> None:
    """Otherwise the router would apply it to every salt."""
    prompt = [45, *PROMPT]
    salted = stored(await events_of(llm, prompt, cache_salt="tenant"))
    plain = stored(await events_of(llm, prompt))
    assert [block["cache_salt"] for block in salted] == ["tenant"] * len(salted)
    assert not any(block.get("cache_salt") for block in plain)
    assert not {b["block_hash"] for b in salted} & {b["block_hash"] for b in plain}


async def test_evicted_blocks_are_removed(llm: Any) -> None:
    capacity = llm.get_kv_cache_capacity()["maxNumBlocks"]
    prompts = [[50 + i % 40, i // 40 + 5, *range(5, 205)] for i in range(capacity // 6 + 2)]
    await drain(llm.get_kv_cache_events_async(timeout=0.5))
    for prompt in prompts:
        await llm.generate_async(prompt, sampling(max_tokens=1))
    events = await drain(llm.get_kv_cache_events_async(timeout=5))
    known = {block["block_hash"] for block in stored(events)}
    removed = [event["data"]["block_hashes"] for event in events if event["data"]["type"] == "removed"]
    assert removed
    assert known & {block for hashes in removed for block in hashes}


async def test_a_new_engine_begins_with_created(make_llm: MakeLlm) -> None:
    """And this one's end: no request after shutdown, and a second shutdown is harmless."""
    llm = make_llm(cache_transceiver_config=None)
    await llm.generate_async(PROMPT, sampling(max_tokens=1))
    first = (await drain(llm.get_kv_cache_events_async(timeout=5)))[0]
    assert first["event_id"] == 0
    assert first["data"]["type"] == "created"
    levels = first["data"]["num_blocks_per_cache_level"]
    assert levels[0] == llm.get_kv_cache_capacity()["maxNumBlocks"]

    llm.shutdown()
    with pytest.raises(RuntimeError, match="LLM is shutting down"):
        llm.generate_async(PROMPT, sampling())
    assert not llm._check_health()
    llm.shutdown()


# -- statistics


async def stats_of(llm: Any, prompt: list[int], max_tokens: int) -> list[dict[str, Any]]:
    await drain(llm.get_stats_async(timeout=0.5))
    await llm.generate_async(prompt, sampling(max_tokens=max_tokens))
    return await drain(llm.get_stats_async(timeout=5))


def assert_has(record: dict[str, Any], fields: dict[str, type]) -> None:
    for name, kind in fields.items():
        assert name in record
        assert isinstance(record[name], (int, float) if kind is float else kind), name


async def test_every_iterations_statistics_have_all_fields(llm: Any) -> None:
    stats = await stats_of(llm, [61, *PROMPT], max_tokens=6)
    assert stats
    for stat in stats:
        assert_has(stat, STATS)
        assert_has(stat["kvCacheStats"], KV_CACHE_STATS)
        assert_has(stat["inflightBatchingStats"], INFLIGHT_STATS)
    iterations = [stat["iter"] for stat in stats]
    assert iterations == sorted(set(iterations))


async def test_statistics_of_one_request_add_up_to_its_tokens(llm: Any) -> None:
    prompt = [247, *PROMPT]
    stats = await stats_of(llm, prompt, max_tokens=6)
    inflight = [stat["inflightBatchingStats"] for stat in stats]
    assert sum(stat["numCtxTokens"] for stat in inflight) == len(prompt)
    assert sum(stat["numNewActiveRequests"] for stat in stats) == 1
    assert sum(stat["numCompletedRequests"] for stat in stats) == 1
    assert max(stat["numGenRequests"] for stat in inflight) == 1
    for stat in stats:
        blocks = stat["kvCacheStats"]
        assert blocks["usedNumBlocks"] + blocks["freeNumBlocks"] == blocks["maxNumBlocks"]
        assert 0 <= blocks["cacheHitRate"] <= 1
        assert stat["maxBatchSizeStatic"] == MAX_BATCH_SIZE


def test_the_capacity_has_room_for_the_longest_sequence(llm: Any) -> None:
    capacity = llm.get_kv_cache_capacity()
    assert capacity["tokensPerBlock"] == TOKENS_PER_BLOCK
    assert capacity["maxNumBlocks"] * TOKENS_PER_BLOCK >= MAX_SEQ_LEN


async def test_the_calls_that_return_lists_give_each_record_once_and_go_on_in_other_threads(llm: Any) -> None:
    """As this project reads them. The iterators are TensorRT-LLM's own for the loop of their first caller."""
    for name, prompt in (("get_stats", [71, *PROMPT]), ("get_kv_cache_events", [72, *PROMPT])):
        read = partial(asyncio.to_thread, partial(getattr(llm, name), timeout=5))
        await read()
        await llm.generate_async(prompt, sampling(max_tokens=2))
        records = await read()
        assert records
        assert all(isinstance(record, dict) for record in records)
        await llm.generate_async([73, *prompt], sampling(max_tokens=2))
        assert not [record for record in await read() if record in records]


# -- adapters


@pytest.mark.skipif(not IS_EMBEDDED, reason="TensorRT-LLM serves adapters")
@pytest.mark.parametrize("name", ["lora_request", "prompt_adapter_request"])
async def test_an_adapter_is_refused_by_name(llm: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        llm.generate_async(PROMPT, sampling(), **{name: object()})


@pytest.mark.skipif(not IS_EMBEDDED, reason="TensorRT-LLM serves adapters")
@pytest.mark.parametrize(
    "values",
    [{"enable_lora": True}, {"lora_config": {"max_lora_rank": 8}}, {"peft_cache_config": {}}],
    ids=str,
)
def test_an_llm_with_adapters_is_refused_by_name(make_llm: MakeLlm, values: dict[str, Any]) -> None:
    from trtllm_disagg.errors import ConfigError

    with pytest.raises(ConfigError, match=next(iter(values))):
        make_llm(**values)


@needs_a_model
@pytest.mark.skipif(not IS_EMBEDDED, reason="TensorRT-LLM serves both")
def test_a_guide_library_that_is_not_there_is_refused_by_name(make_llm: MakeLlm) -> None:
    from trtllm_disagg.errors import ConfigError

    with pytest.raises(ConfigError, match=r"guided_decoding_backend: 'xgrammar'.*llguidance"):
        make_llm(guided_decoding_backend="xgrammar")


# -- the times of a request


NEVER = timedelta(0)
#: Longer than two blocks, and no other prompt's.
FRESH = [11 + (13 * i) % 67 for i in range(2 * TOKENS_PER_BLOCK + 9)]


def measured(**fields: Any) -> Any:
    return sampling(return_perf_metrics=True, **fields)


async def test_a_request_that_does_not_ask_has_no_metrics(llm: Any) -> None:
    result = await llm.generate_async(OTHER_PROMPT, sampling(max_tokens=2)).aresult()
    assert result.outputs[0].request_perf_metrics is None
    assert result.metrics_dict == {}


async def test_the_times_of_a_request_are_in_order(llm: Any) -> None:
    result = await llm.generate_async(OTHER_PROMPT, measured(max_tokens=6)).aresult()
    timing = result.outputs[0].request_perf_metrics.timing_metrics
    times = [
        timing.arrival_time,
        timing.first_scheduled_time,
        timing.first_token_time,
        timing.last_token_time,
    ]
    assert NEVER < times[0] <= times[1] < times[2] < times[3]
    assert timing.kv_cache_transfer_start == timing.kv_cache_transfer_end == NEVER
    assert timing.kv_cache_size == 0


async def test_metrics_are_made_of_the_times(llm: Any) -> None:
    names = find("MetricNames")
    result = await llm.generate_async(OTHER_PROMPT, measured(max_tokens=6)).aresult()
    timing = result.outputs[0].request_perf_metrics.timing_metrics
    told = result.metrics_dict
    first, last = timing.first_token_time, timing.last_token_time

    def seconds(since: timedelta, until: timedelta) -> Any:
        return pytest.approx((until - since).total_seconds(), abs=1e-5)

    assert told["finished_reason"] == "length"
    assert told[names.TTFT] == seconds(timing.arrival_time, first)
    assert told[names.E2E] == seconds(timing.arrival_time, last)
    assert told[names.REQUEST_QUEUE_TIME] == seconds(timing.arrival_time, timing.first_scheduled_time)
    assert told[names.TPOT] * 5 == seconds(first, last)


async def test_several_choices_do_not_count_their_tokens_twice(llm: Any) -> None:
    names = find("MetricNames")
    result = await llm.generate_async(OTHER_PROMPT, measured(max_tokens=6, n=2, temperature=1.0)).aresult()
    assert all(output.request_perf_metrics is not None for output in result.outputs)
    assert names.TPOT not in result.metrics_dict
    assert names.TTFT in result.metrics_dict


async def test_the_prompts_blocks_are_reused_or_missed(llm: Any) -> None:
    first, second = [
        (await llm.generate_async(FRESH, measured(max_tokens=1)).aresult()).outputs[0].request_perf_metrics
        for _ in range(2)
    ]
    assert (first.kv_cache_metrics.num_reused_blocks, first.kv_cache_metrics.num_missed_blocks) == (0, 3)
    assert first.kv_cache_metrics.num_total_allocated_blocks >= 3
    assert second.kv_cache_metrics.num_reused_blocks == 2
    assert second.kv_cache_metrics.num_missed_blocks == 1


async def test_decode_metrics_have_the_kv_transfer_times_and_size(llm: Any, decode_llm: Any) -> None:
    handed = await prefill(llm, FRESH, return_perf_metrics=True)
    result = await decode(
        decode_llm, handoff_of(handed), FRESH, return_perf_metrics=True, max_tokens=4
    ).aresult()

    timing = result.outputs[0].request_perf_metrics.timing_metrics
    assert timing.arrival_time <= timing.kv_cache_transfer_start < timing.kv_cache_transfer_end
    assert timing.kv_cache_transfer_end <= timing.first_token_time < timing.last_token_time
    assert timing.kv_cache_size > 0
    # Nothing was in its cache; that all of it came from elsewhere is no hit.
    blocks = result.outputs[0].request_perf_metrics.kv_cache_metrics
    assert (blocks.num_reused_blocks, blocks.num_missed_blocks) == (0, 3)
    sender = handed.outputs[0].request_perf_metrics.timing_metrics
    assert NEVER < sender.first_scheduled_time < sender.first_token_time


async def test_return_perf_metrics_of_the_engine_measures_all_requests(make_llm: Any) -> None:
    with make_llm(return_perf_metrics=True) as llm:
        result = await llm.generate_async(OTHER_PROMPT, sampling(max_tokens=2)).aresult()
        assert result.outputs[0].request_perf_metrics.timing_metrics.arrival_time > NEVER
