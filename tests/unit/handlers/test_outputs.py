"""Cumulative outputs of the LLM API become chunks of what is new."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handling import request
from tests.support.recording_pair import recording_engine
from trtllm_disagg.engine.llm_api import RequestOutput
from trtllm_disagg.engines.recording.llm import CompletionOutput, Logprob
from trtllm_disagg.handlers.outputs import OutputCursor, newest_states
from trtllm_disagg.types import PromptTokensDetails, TokenChunk, Usage

Entry = dict[int, Logprob]


def result_of(
    tokens: list[int], finish_reason: str | None = None, *, cached_tokens: Any = 0, **fields: Any
) -> Any:
    output = CompletionOutput(index=0, token_ids=tokens, finish_reason=finish_reason, **fields)
    return SimpleNamespace(outputs=[output], cached_tokens=cached_tokens)


def advance(cursor: OutputCursor, *args: Any, **kwargs: Any) -> TokenChunk:
    (chunk,) = cursor.advance(result_of(*args, **kwargs))
    return chunk


def test_chunk_has_only_new_tokens() -> None:
    cursor = OutputCursor(3)
    assert advance(cursor, [5]).token_ids == [5]
    assert advance(cursor, [5, 6, 7]).token_ids == [6, 7]
    assert not cursor.advance(result_of([5, 6, 7]))
    assert advance(cursor, [5, 6, 7], "cancelled").token_ids == [], "the end is a chunk too"


def test_tokens_that_the_client_has_are_skipped_but_counted() -> None:
    cursor = OutputCursor(3, skip=1)
    assert not cursor.advance(result_of([5]))
    last = advance(cursor, [5, 6], "length", logprobs=[{5: Logprob(-0.5)}, {6: Logprob(-0.75)}])
    assert (last.token_ids, last.log_probs) == ([6], [-0.75])
    assert last.completion_usage is not None
    assert last.completion_usage.completion_tokens == 2


def test_the_first_chunk_has_cached_tokens_and_only_the_last_one_the_finish_reason() -> None:
    """At a stop string the frontend ends the answer without the last chunk."""
    cursor = OutputCursor(3)
    first = advance(cursor, [5], stop_reason=9, cached_tokens=2)
    assert first == TokenChunk([5], completion_usage=Usage(3, 1, 4, PromptTokensDetails(2)))
    assert advance(cursor, [5, 7]) == TokenChunk([7])
    last = advance(cursor, [5, 7, 6], "stop", stop_reason=9, cached_tokens=2)
    assert last == TokenChunk(
        [6], finish_reason="stop", stop_reason=9, completion_usage=Usage(3, 3, 6, PromptTokensDetails(2))
    )


@pytest.mark.parametrize(("given", "counted", "shown"), [(None, 7, 7), (None, None, 0), (4, 7, 4), (0, 7, 0)])
def test_the_given_count_of_cached_tokens_wins_over_the_engines(
    given: int | None, counted: int | None, shown: int
) -> None:
    last = advance(OutputCursor(9, cached_tokens=given), [5], "stop", cached_tokens=counted)
    assert last.completion_usage is not None
    assert last.completion_usage.prompt_tokens_details == PromptTokensDetails(shown)


@pytest.mark.parametrize(
    ("was_fetched", "counted", "shown", "told"),
    [
        (True, 30, 10, {"cached_tokens_engine_reported": 30}),
        (False, 30, 30, None),
        # The embedded engine has prefill's count, also where no handoff carries it: generation_first.
        (True, 20, 20, None),
    ],
)
def test_fetched_kv_does_not_count_as_cached(
    was_fetched: bool, counted: int, shown: int, told: dict[str, int] | None
) -> None:
    """To TensorRT-LLM all of it is cached."""
    blocks = SimpleNamespace(num_reused_blocks=1, num_missed_blocks=2)
    measured = SimpleNamespace(kv_cache_metrics=blocks, timing_metrics=None)
    cursor = OutputCursor(30, was_fetched=was_fetched)
    last = advance(cursor, [5], "stop", cached_tokens=counted, request_perf_metrics=measured)
    assert last.completion_usage is not None
    assert last.completion_usage.prompt_tokens_details == PromptTokensDetails(shown)
    assert last.engine_data == told


def test_logprobs_have_the_chosen_token_and_its_alternatives() -> None:
    entries: list[Entry] = [{5: Logprob(-0.25, 1), 6: Logprob(-1.5, 2)}, {8: Logprob(-0.1), 7: Logprob(-3.0)}]
    chunk = advance(OutputCursor(3), [6, 7], logprobs=entries)
    assert chunk.log_probs == [-1.5, -3.0]
    assert chunk.top_logprobs == [
        [
            {"rank": 1, "token_id": 5, "token": None, "logprob": -0.25},
            {"rank": 2, "token_id": 6, "token": None, "logprob": -1.5},
        ],
        [
            {"rank": 0, "token_id": 8, "token": None, "logprob": -0.1},
            {"rank": 0, "token_id": 7, "token": None, "logprob": -3.0},
        ],
    ]


@pytest.mark.parametrize(
    ("entries", "log_probs"),
    [
        ([], None),
        ([{5: Logprob(-0.5)}], None),
        ([{5: Logprob(-0.5)}, {}], None),
        ([None, {6: Logprob(0.0)}], None),
        # Plain numbers are those of the chosen tokens.
        ([0.0, -2.0], [0.0, -2.0]),
    ],
)
def test_missing_logprobs_are_left_out_and_never_shifted(
    entries: list[Any], log_probs: list[float] | None
) -> None:
    chunk = advance(OutputCursor(3), [5, 6], logprobs=entries)
    assert (chunk.token_ids, chunk.log_probs, chunk.top_logprobs) == ([5, 6], log_probs, None)


def test_an_engine_without_the_drawn_token_has_the_first_ones_logprob() -> None:
    """As Dynamo's worker takes it."""
    chunk = advance(OutputCursor(3), [5, 6], logprobs=[{9: Logprob(-0.5, 1)}, {6: Logprob(-1.0)}])
    assert chunk.log_probs == [-0.5, -1.0]


@given(
    tokens=st.lists(st.integers(0, 99), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=6),
    skip=st.integers(0, 3),
)
def test_each_token_comes_once_with_any_grouping_of_outputs(
    tokens: list[int], cuts: list[int], skip: int
) -> None:
    cursor = OutputCursor(1, skip=skip)
    entries: list[Entry] = [{token: Logprob(-float(place))} for place, token in enumerate(tokens)]
    chunks: list[TokenChunk] = []
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        chunks += cursor.advance(result_of(tokens[:cut], logprobs=entries[:cut]))
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens[skip:]
    assert [lp for chunk in chunks for lp in chunk.log_probs or ()] == [
        -float(n) for n in range(skip, len(tokens))
    ]


async def test_the_states_of_a_request_end_when_its_reader_is_cancelled_before_it_has_begun() -> None:
    engine = recording_engine()
    result = engine.start_agg(request())

    def cancel(reader: asyncio.Future[Any], result: RequestOutput) -> None:
        reader.cancel()

    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            async for _ in newest_states(result, lambda: None, cancel):
                pass
