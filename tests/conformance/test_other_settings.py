"""Settings of how often an engine reports, and what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conformance.api import OTHER_PROMPT, PROMPT, sampling

INTERVAL = 4


@pytest.fixture(scope="module")
def told_llm(make_llm: Callable[..., Any]) -> Iterator[Any]:
    with make_llm(
        stream_interval=INTERVAL,
        enable_iter_req_stats=True,
        enable_chunked_prefill=True,
        max_num_tokens=64,
    ) as llm:
        yield llm


async def lengths(result: Any) -> list[int]:
    return [update.outputs[0].length async for update in result]


# -- stream_interval


async def test_a_stream_has_the_first_token_every_fourth_one_and_the_end(told_llm: Any, llm: Any) -> None:
    usual = await llm.generate_async(PROMPT, sampling(max_tokens=10, logprobs=1)).aresult()
    result = told_llm.generate_async(PROMPT, sampling(max_tokens=10, logprobs=1), streaming=True)
    seen = await lengths(result)
    # A slow reader gets several at once.
    assert set(seen) <= {1, 4, 8, 10}
    assert seen[-1] == 10
    output = result.outputs[0]
    assert list(output.token_ids) == list(usual.outputs[0].token_ids)
    assert [list(entry) for entry in output.logprobs] == [list(e) for e in usual.outputs[0].logprobs]


async def test_a_request_that_does_not_stream_is_not_concerned(told_llm: Any, llm: Any) -> None:
    usual = await llm.generate_async(PROMPT, sampling(max_tokens=11)).aresult()
    result = await told_llm.generate_async(PROMPT, sampling(max_tokens=11)).aresult()
    assert list(result.outputs[0].token_ids) == list(usual.outputs[0].token_ids)


async def test_several_choices_stream_apart(told_llm: Any) -> None:
    params = sampling(max_tokens=6, n=2, temperature=1.0, seed=5)
    result = told_llm.generate_async(OTHER_PROMPT, params, streaming=True)
    seen = {tuple(output.length for output in update.outputs) async for update in result}
    assert {length for pair in seen for length in pair} <= {0, 1, 4, 6}
    assert [output.length for output in result.outputs] == [6, 6]


@pytest.mark.parametrize("position", [1, 2, 5])
async def test_stop_token_ends_an_interval_stream_at_any_position(
    told_llm: Any, llm: Any, position: int
) -> None:
    usual = list((await llm.generate_async(PROMPT, sampling(max_tokens=8)).aresult()).outputs[0].token_ids)
    stop = usual[position]
    params = sampling(max_tokens=8, stop_token_ids=[stop], ignore_eos=False, end_id=-1)
    result = told_llm.generate_async(PROMPT, params, streaming=True)
    await lengths(result)
    output = result.outputs[0]
    assert list(output.token_ids) == usual[: usual.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


async def test_aborted_interval_stream_ends_as_cancelled(told_llm: Any) -> None:
    result = told_llm.generate_async(PROMPT, sampling(max_tokens=300), streaming=True)
    await anext(result)
    result.abort()
    await lengths(result)
    assert result.outputs[0].finish_reason == "cancelled"
    assert result.outputs[0].length < 300


# -- enable_iter_req_stats


async def test_request_statistics_have_each_step_of_each_request(told_llm: Any) -> None:
    told_llm.get_stats(timeout=2)
    fresh = [17 + (11 * i) % 61 for i in range(100)]
    await told_llm.generate_async(fresh, sampling(max_tokens=3)).aresult()
    stats = [each for each in told_llm.get_stats(timeout=2) if each.get("requestStats")]
    told = [entry for each in stats for entry in each["requestStats"]]

    assert len({entry["id"] for entry in told}) == 1
    ran = [entry for entry in told if entry["scheduled"]]
    # The prompt takes two steps of 64 tokens; what is left of the budget is not.
    assert [(entry["contextPrefillPosition"], entry["numGeneratedTokens"]) for entry in ran] == [
        (64, 0),
        (100, 1),
        (100, 2),
        (100, 3),
    ]
    stages = [entry["stage"] for entry in ran]
    assert stages == [
        "CONTEXT_IN_PROGRESS",
        "GENERATION_IN_PROGRESS",
        "GENERATION_IN_PROGRESS",
        "GENERATION_COMPLETE",
    ]
    assert {entry["paused"] for entry in told} == {False}
    assert {entry["disServingStats"] for entry in told} == {None}
    last = ran[-1]
    assert last["allocNewBlocksPerRequest"] >= last["missedBlocksPerRequest"] > 0
    assert 0 <= last["kvCacheHitRatePerRequest"] <= 1


async def test_request_statistics_are_off_by_default(llm: Any) -> None:
    llm.get_stats(timeout=2)
    await llm.generate_async(PROMPT, sampling(max_tokens=3)).aresult()
    stats = llm.get_stats(timeout=2)
    assert stats
    assert not any(each.get("requestStats") for each in stats)
