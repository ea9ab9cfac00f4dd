"""What a request took, when it asks for that: `request_perf_metrics` of an output, `metrics_dict` of a result."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.conformance.api import OTHER_PROMPT, TOKENS_PER_BLOCK, find, sampling
from tests.conformance.test_handoffs import decode, handoff_of, prefill

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
