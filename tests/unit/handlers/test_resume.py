"""What is asked for again after a failure, and what of its answer is new."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handling import PROMPT, expected_tokens, request
from tests.support.trying import Unlimited
from trtllm_disagg.errors import EngineError
from trtllm_disagg.handlers.delivered import Appended, Delivered, Replayed, replay_if_needed
from trtllm_disagg.types import TokenChunk, Usage

DELIVERED = expected_tokens(3)


def delivering(tokens: list[int]) -> Delivered:
    return Delivered(tokens, replay_if_needed, Unlimited())


def test_remainder_without_delivered_tokens_is_the_request() -> None:
    asked, chunk = request(), TokenChunk([1])
    delivered = delivering([])
    assert delivered.begin(asked) is asked
    assert delivered.new(chunk) is chunk


@pytest.mark.parametrize(("most", "left"), [(8, 5), (None, None)])
def test_delivered_tokens_are_appended_to_the_prompt(most: int | None, left: int | None) -> None:
    asked = request(stop_conditions={"max_tokens": most, "min_tokens": 5, "other": 1})
    remainder = Appended(asked, DELIVERED)
    assert remainder.request.token_ids == remainder.request.raw["token_ids"] == PROMPT + DELIVERED
    assert remainder.request.raw["stop_conditions"] == {"max_tokens": left, "min_tokens": 2, "other": 1}
    assert (remainder.request.stop.max_tokens, remainder.request.stop.min_tokens) == (left, 2)
    assert (asked.token_ids, asked.raw["stop_conditions"]["max_tokens"]) == (PROMPT, most)
    new = remainder.new(TokenChunk([9], finish_reason="stop", completion_usage=Usage.of(6, 5, 6)))
    assert new is not None
    assert new.completion_usage == Usage.of(len(PROMPT), 8, len(PROMPT))


@pytest.mark.parametrize(
    ("sampling", "is_replayed"),
    [
        ({"guided_decoding": {"regex": "a*"}}, True),
        # Penalties count the prompt.
        *(({f"{name}_penalty": 1.5}, False) for name in ("presence", "frequency", "repetition")),
    ],
)
def test_only_a_request_with_a_guide_is_replayed(sampling: dict[str, Any], is_replayed: bool) -> None:
    delivered = delivering(DELIVERED)
    asked = request(sampling_options=sampling)
    assert (delivered.begin(asked) is asked) is is_replayed
    assert delivered.are_appended is not is_replayed


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


@pytest.mark.parametrize(
    "chunk",
    # An engine returns no token for the end: another worker has made that in place of the next token.
    [TokenChunk([1, 3]), *(TokenChunk(tokens, finish_reason="stop") for tokens in ([], [1]))],
)
def test_replay_that_begins_differently_or_ends_early_is_an_error(chunk: TokenChunk) -> None:
    with pytest.raises(EngineError, match="began it differently"):
        Replayed(request(), [1, 2]).new(chunk)


def test_replay_that_is_aborted_ends_as_it_was_told() -> None:
    aborted = TokenChunk([], finish_reason="cancelled")
    assert Replayed(request(), [1, 2]).new(aborted) == aborted
