"""Settings of how often an engine reports."""

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
