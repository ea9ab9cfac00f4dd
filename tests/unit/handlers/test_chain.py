"""On every way out of a request the prefill's KV is fetched or released, once, and nothing runs on."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.support.handling import ORDERS, STRATEGIES, collect, expected_tokens, request, tokens_of
from tests.support.recording_pair import Pair, leftover_tasks, make_pair
from tests.support.stage_client import FakeContext
from trtllm_disagg.engines.recording.llm import LLM, RequestError, Script
from trtllm_disagg.errors import EngineError, PeerUnavailableError
from trtllm_disagg.handlers.chain import Chain, PrefillService
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.types import GenerateRequest, Handoff, PrefillResult, RequestContext, TokenChunk

pytestmark = pytest.mark.usefixtures("no_leaks")

FIRST = TokenChunk([7])


def bare_pair(strategy: str) -> Pair:
    """Without a fallback: what fails here is the client's to know."""
    return make_pair(
        strategy, **({} if strategy == "router" else {"max_tries": 1, "on_missing_stage": "fail"})
    )


SECOND = TokenChunk([8], finish_reason="length")


class Phases:
    """A prefill that counts how often its KV was released, and a decode that counts its ends."""

    def __init__(self, *, final: bool = False) -> None:
        self.releases = 0
        self.decodes = 0
        self.closed = 0
        self._final = final

    def release(self) -> None:
        self.releases += 1

    async def prefill(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        if self._final:
            return Handoff(SECOND, None)
        result = PrefillResult({"opaque_state": "eA=="})
        return Handoff(FIRST, result, on_release=lambda handoff: self.release())

    async def decode(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        self.decodes += 1
        try:
            yield SECOND
        finally:
            self.closed += 1


async def test_leaving_closes_decode_at_once() -> None:
    phases = Phases()
    chunks = Chain(phases.prefill, phases.decode)(request(), FakeContext())
    assert [await anext(chunks), await anext(chunks)] == [FIRST, SECOND]
    await chunks.aclose()
    assert (phases.decodes, phases.closed, phases.releases) == (1, 1, 1)


async def test_a_final_handoff_is_the_whole_answer() -> None:
    phases = Phases(final=True)
    assert await collect(Chain(phases.prefill, phases.decode), request()) == [SECOND]
    assert phases.decodes == 0


async def test_a_PrefillService_keeps_the_kv_of_a_delivered_answer_only() -> None:
    phases = Phases()
    (chunk,) = await collect(PrefillService(phases.prefill, Recalls(tuple, 60.0)), request())
    assert chunk.disaggregated_params == {"opaque_state": "eA=="}
    assert phases.releases == 0
    dropped = PrefillService(phases.prefill, Recalls(tuple, 60.0))(request(), FakeContext())
    await anext(dropped)
    await dropped.aclose()
    assert phases.releases == 1
    context = FakeContext()
    stopped = PrefillService(phases.prefill, Recalls(tuple, 60.0))(request(), context)
    await anext(stopped)
    context.stop()
    assert [chunk async for chunk in stopped] == []
    assert phases.releases == 2


# -- the same with both workers


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("error_at", [0, 1, 3])
async def test_a_failure_of_decodes_engine_comes_behind_the_tokens_before_it(
    order: str, error_at: int
) -> None:
    pair = bare_pair(order)
    pair.decode.scripts.append(Script(error=RequestError("boom"), error_at=error_at))
    got: list[TokenChunk] = []
    with pytest.raises(EngineError, match="boom"):
        await collect(pair.generate, request(), into=got)
    assert tokens_of(got) == expected_tokens(max(error_at, 1))
    await leftover_tasks()


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_failure_of_prefills_engine_calls_no_decode(strategy: str) -> None:
    pair = bare_pair(strategy)
    pair.prefill.scripts.append(Script(error=RequestError("boom")))
    with pytest.raises(EngineError, match="boom"):
        await collect(pair.generate, request())
    assert pair.decode.results == []


@pytest.mark.parametrize("order", ORDERS)
async def test_missing_kv_raises_peer_unavailable(order: str) -> None:
    """Under `bare_pair` nothing is tried again."""
    pair = bare_pair(order)
    chunks = pair.generate(request(), FakeContext())
    await anext(chunks)
    LLM.kv_store.clear()
    with pytest.raises(PeerUnavailableError, match="kv cache transfer"):
        await anext(chunks)
