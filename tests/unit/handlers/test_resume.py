"""What is asked for again after a failure, and what of its answer is new."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handling import PROMPT, expected_tokens, request
from trtllm_disagg.errors import EngineError
from trtllm_disagg.handlers.fallback import Appended, Replayed, end_chunk, has_ended, remainder_of
from trtllm_disagg.types import TokenChunk, Usage

DELIVERED = expected_tokens(3)


def test_remainder_without_delivered_tokens_is_the_request() -> None:
    asked, chunk = request(), TokenChunk([1])
    rest = remainder_of(asked, [])
    assert rest.request is asked
    assert rest.new(chunk) is chunk


def test_delivered_tokens_are_appended_to_the_prompt() -> None:
    asked = request(8, stop_conditions={"max_tokens": 8, "min_tokens": 5, "other": 1})
    rest = remainder_of(asked, DELIVERED)
    assert rest.request.token_ids == rest.request.raw["token_ids"] == PROMPT + DELIVERED
    assert rest.request.raw["stop_conditions"] == {"max_tokens": 5, "min_tokens": 2, "other": 1}
    assert (rest.request.stop.max_tokens, rest.request.stop.min_tokens) == (5, 2)
    assert (asked.token_ids, asked.raw["stop_conditions"]["max_tokens"]) == (PROMPT, 8)


def test_remainder_of_a_request_without_max_tokens_has_none() -> None:
    rest = remainder_of(request(None), DELIVERED)
    assert rest.request.stop.max_tokens is None
    assert rest.request.raw["stop_conditions"]["max_tokens"] is None


def test_usage_of_an_appended_answer_is_that_of_the_whole() -> None:
    last = TokenChunk([9], finish_reason="stop", completion_usage=Usage.of(6, 5, 6))
    new = Appended(request(), DELIVERED).new(last)
    assert new is not None
    assert new.completion_usage == Usage.of(len(PROMPT), 8, len(PROMPT))


def test_request_with_a_guide_is_replayed() -> None:
    asked = request(sampling_options={"guided_decoding": {"regex": "a*"}})
    rest = remainder_of(asked, DELIVERED)
    assert isinstance(rest, Replayed)
    assert rest.request is asked


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_allow_appending_because_they_count_the_prompt(name: str) -> None:
    sampling = {name: 1.5}
    assert isinstance(remainder_of(request(sampling_options=sampling), DELIVERED), Appended)


@given(st.integers(1, 12), st.integers(0, 12), st.lists(st.integers(0, 12), max_size=6))
def test_replay_drops_delivered_tokens_with_any_chunks(
    length: int, num_delivered: int, cuts: list[int]
) -> None:
    """However the answer is cut into chunks."""
    tokens = list(range(100, 100 + length))
    num_delivered = min(num_delivered, length)
    ends = sorted({0, length, *(cut for cut in cuts if cut < length)})
    chunks = [
        TokenChunk(
            tokens[start:end],
            log_probs=[float(t) for t in tokens[start:end]],
            finish_reason="length" if end == length else None,
        )
        for start, end in pairwise(ends)
    ]
    replayed = Replayed(request(), tokens[:num_delivered])
    new = [chunk for chunk in map(replayed.new, chunks) if chunk is not None]
    assert [t for chunk in new for t in chunk.token_ids] == tokens[num_delivered:]
    assert [p for chunk in new for p in chunk.log_probs or []] == [float(t) for t in tokens[num_delivered:]]
    assert new[-1].finish_reason == "length"
    assert all(chunk.token_ids or chunk.finish_reason for chunk in new)


def test_replay_that_begins_differently_is_an_error() -> None:
    with pytest.raises(EngineError, match="began it differently"):
        Replayed(request(), [1, 2]).new(TokenChunk([1, 3]))


@pytest.mark.parametrize("tokens", [[], [1]])
def test_replay_that_ends_before_the_tokens_that_a_client_has_is_an_error(tokens: list[int]) -> None:
    """An engine returns no token for the end: another worker has made that in place of the next token."""
    with pytest.raises(EngineError, match="began it differently"):
        Replayed(request(), [1, 2]).new(TokenChunk(tokens, finish_reason="stop"))


def test_replay_that_is_aborted_ends_as_it_was_told() -> None:
    aborted = TokenChunk([], finish_reason="cancelled")
    assert Replayed(request(), [1, 2]).new(aborted) == aborted


def test_answer_with_all_its_tokens_has_ended_and_gets_an_end_chunk() -> None:
    assert has_ended(request(3), DELIVERED)
    assert not has_ended(request(4), DELIVERED)
    assert not has_ended(request(None), DELIVERED)
    end = end_chunk(request(3), DELIVERED)
    assert (end.token_ids, end.finish_reason) == ([], "length")
    assert end.completion_usage == Usage.of(len(PROMPT), 3, 0)
