"""The order that a request asks for itself: `nvext.annotations`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.handling import ORDERS, collect, expected_tokens, request, tokens_of
from tests.support.recording_pair import make_pair
from trtllm_disagg.engines.recording.llm import LLM, RequestError, Script
from trtllm_disagg.errors import InvalidRequestError, PeerUnavailableError
from trtllm_disagg.strategies import worker_side

pytestmark = pytest.mark.usefixtures("no_leaks")

_WAYS = ", ".join(f"disagg:{name}" for name in sorted(("local", *worker_side())))
ALLOWED = f"expected one of {_WAYS}, disagg:next=INSTANCE,..."


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "words",
    [
        ["disagg:sideways"],
        ["disagg:"],
        ["disagg:strategy=local"],
        ["disagg:nxt=1a2b"],
        ["disagg:next"],
        ["disagg:local", "disagg:sideways"],
    ],
)
async def test_unknown_annotation_is_refused_with_the_allowed_ones(order: str, words: list[str]) -> None:
    """A misspelt wish must not be heard as none."""
    with pytest.raises(InvalidRequestError) as caught:
        await collect(make_pair(order).generate, request(4, annotations=words))
    assert str(caught.value) == f"nvext.annotations: {words[-1]!r} is not allowed; {ALLOWED}"


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


@pytest.mark.parametrize(
    ("settings", "wishes"),
    [({}, {"annotations": ["disagg:local"]}), ({"prefill_decider": "length"}, {})],
    ids=["annotation", "decider"],
)
@pytest.mark.parametrize("strategy", ORDERS)
async def test_a_dead_engine_costs_no_answer_that_its_worker_kept(
    strategy: str, settings: dict[str, Any], wishes: dict[str, Any]
) -> None:
    pair = make_pair(strategy, **settings)
    first = pair.prefill if strategy == "prefill_first" else pair.decode
    first.scripts.append(Script(error=RequestError("it died")))
    first.is_healthy = False
    asked = request(5, **wishes)
    assert tokens_of(await collect(pair.generate, asked)) == expected_tokens(5)
    assert asked.trace.fallbacks == ["other_stage: it died"]
    await pair.idle()
    LLM.kv_store.clear()
