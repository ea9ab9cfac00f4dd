"""A frontend asks for the end of an answer that lost its worker behind the last token."""

from __future__ import annotations

import pytest

from tests.support.handling import collect, raw_request, request
from tests.support.recording_pair import make_pair
from trtllm_disagg.errors import InvalidRequestError
from trtllm_disagg.strategies import worker_side
from trtllm_disagg.types import TokenChunk, Usage
from trtllm_disagg.wire.bodies import decode_request

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("strategy", worker_side())
async def test_request_with_max_tokens_0_gets_only_a_finish_reason(strategy: str) -> None:
    """No engine is asked: each would make a token."""
    pair = make_pair(strategy)
    asked = request(0)
    usage = Usage.of(len(asked.token_ids), 0, 0)
    assert await collect(pair.generate, asked) == [
        TokenChunk([], finish_reason="length", completion_usage=usage)
    ]
    assert (asked.trace.strategy, asked.trace.reason) == ("local", "nothing_left")
    assert not pair.prefill.results
    assert not pair.decode.results


def test_negative_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens=-1 is not allowed; expected at least 1"):
        decode_request(raw_request(stop_conditions={"max_tokens": -1}))
