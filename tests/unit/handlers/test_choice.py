"""The order that a request asks for itself: `nvext.annotations`."""

from __future__ import annotations

import pytest

from tests.support.handling import ORDERS, collect, expected_tokens, request, tokens_of
from tests.support.recording_pair import make_pair
from trtllm_disagg.errors import InvalidRequestError, PeerUnavailableError
from trtllm_disagg.strategies import worker_side

pytestmark = pytest.mark.usefixtures("no_leaks")

_WAYS = ("local", *worker_side())


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("prefill_first", ["disagg:sideways"]),
        ("decode_first", ["disagg:"]),
        ("prefill_first", ["disagg:strategy=local"]),
        ("decode_first", ["disagg:nxt=1a2b"]),
        ("prefill_first", ["disagg:next"]),
        ("decode_first", ["disagg:local", "disagg:sideways"]),
    ],
)
async def test_unknown_annotation_is_refused_with_the_allowed_ones(order: str, words: list[str]) -> None:
    """A misspelt wish must not be heard as none."""
    with pytest.raises(
        InvalidRequestError, match=f"nvext.annotations: {words[-1]!r} .*disagg:next="
    ) as caught:
        await collect(make_pair(order).generate, request(4, annotations=words))
    assert all(f"disagg:{name}" in str(caught.value) for name in _WAYS)


@pytest.mark.parametrize("order", ORDERS)
async def test_two_orders_contradict_each_other(order: str) -> None:
    with pytest.raises(InvalidRequestError, match="disagg:local and disagg:auto contradict each other"):
        await collect(make_pair(order).generate, request(4, annotations=["disagg:local", "disagg:auto"]))


@pytest.mark.parametrize("order", ORDERS)
async def test_annotations_without_the_prefix_are_ignored(order: str) -> None:
    asked = request(4, annotations=["query_instance_id:", "disagg:local", "disagg:local"])
    assert tokens_of(await collect(make_pair(order).generate, asked)) == expected_tokens(4)
    assert asked.trace.strategy == "local"


@pytest.mark.parametrize("order", ORDERS)
async def test_unknown_strategy_asked_by_a_worker_raises_peer_unavailable(order: str) -> None:
    asked = request(4, errand={"stage": "whole", "strategy": "decode_twice"})
    with pytest.raises(PeerUnavailableError, match="does not know the strategy 'decode_twice'"):
        await collect(make_pair(order).generate, asked)
