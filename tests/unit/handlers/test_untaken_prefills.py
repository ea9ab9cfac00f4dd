"""prefill_first on an engine that cannot release a handoff: what no decode worker takes stays until its lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from tests.support.day_one import Both, kinds, opened
from tests.support.handling import collect, expected_tokens, request, tokens_of, until
from tests.support.mounted_recording import mounted_recording_llm
from tests.support.stage_client import FakeContext, Instances, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.hard_edges import GENERATION_TRANSFER_ERROR, PESSIMISTIC, RequestError
from trtllm_disagg.engines.recording.llm import LLM, Script
from trtllm_disagg.errors import NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.handlers.queued import PrefillQueue
from trtllm_disagg.handlers.selection import InFlight, LeastLoaded, NoStage, Selection
from trtllm_disagg.handlers.services import build_generate, peers_of
from trtllm_disagg.types import GenerateRequest, RequestContext


@pytest.fixture(autouse=True)
def tensorrt_llm() -> Iterator[None]:
    LLM.forget_instances()
    with mounted_recording_llm(PESSIMISTIC):
        yield


def config_of(role: Role, **settings: Any) -> WorkerConfig:
    return WorkerConfig(
        model="org/model", role=role, strategy="prefill_first", engine="tensorrt_llm", **settings
    )


class AllGone(NoStage):
    async def pick(self, request: GenerateRequest) -> RecordingStageClient:
        raise NoInstanceError("no instance of the other stage is there")


async def test_requests_answered_alone_hold_no_kv_while_no_decode_worker_is_there() -> None:
    engine = opened()
    answer = build_generate(config_of(Role.PREFILL), engine, AllGone())
    for _ in range(5):
        assert tokens_of(await collect(answer, request(5))) == expected_tokens(5)
    await until(lambda: not num_in_background())
    assert engine.llm.held_contexts == 0
    assert kinds(engine.llm) == [None] * 5, "no context_only"


async def test_one_token_needs_no_decode_worker() -> None:
    engine = opened()
    answer = build_generate(config_of(Role.PREFILL, on_missing_stage="fail"), engine, AllGone())
    assert tokens_of(await collect(answer, request(1))) == expected_tokens(1)
    with pytest.raises(NoInstanceError):
        await collect(answer, request(2))


async def test_the_only_decode_worker_fails_once_and_no_second_prefill_is_held() -> None:
    pair = Both("prefill_first").day_one("prefill_first")
    pair.decode.scripts.append(Script(error=RequestError(GENERATION_TRANSFER_ERROR)))
    assert tokens_of(await collect(pair.generate, request(5))) == expected_tokens(5)
    await pair.quiet()
    assert pair.contexts == 0


async def test_a_dead_decode_worker_is_not_asked_to_drain_while_another_one_is_there() -> None:
    """It has the least load: its calls have failed at once, and the other one is busy."""
    engine, busy_engine, load = opened(), opened(), InFlight()
    dead = RecordingStageClient(error=PeerUnavailableError("killed"))
    busy = RecordingStageClient(build_generate(config_of(Role.DECODE), busy_engine, RecordingStageClient()))
    selection = Selection(Instances([dead, busy]), LeastLoaded(load), "decode")
    stage = peers_of(config_of(Role.PREFILL), selection, in_flight=load)
    load.add(busy.instance_id, 100)
    answer = build_generate(config_of(Role.PREFILL), engine, stage)
    assert tokens_of(await collect(answer, request(5))) == expected_tokens(5)
    await until(lambda: not num_in_background())
    await busy.idle()
    assert [len(dead.calls), len(busy.calls)] == [1, 2]
    assert engine.llm.held_contexts == 0


class AlwaysRoom:
    """A prefill queue without waiting."""

    async def worker_with_room(
        self, request: GenerateRequest, context: RequestContext, takers: Callable[[], Collection[int]]
    ) -> int:
        return next(iter(takers()))

    def depth(self) -> int:
        return 0


@pytest.mark.parametrize("dispatch", ["direct", "queue"])
async def test_a_client_that_leaves_while_decode_fetches_causes_no_second_fetch(dispatch: str) -> None:
    """A second one fails, which would count against a healthy decode worker."""
    prefill, decode_engine = config_of(Role.PREFILL, prefill_dispatch=dispatch), opened()
    decode = RecordingStageClient(
        build_generate(config_of(Role.DECODE), decode_engine, RecordingStageClient())
    )
    taker = RecordingStageClient(build_generate(prefill, opened(), decode))
    live = LiveState.of(prefill, 32)
    queue = (
        PrefillQueue(AlwaysRoom(), peers_of(prefill, taker, live.breaker)) if dispatch == "queue" else None
    )
    answer = build_generate(prefill, opened(), decode, live, queue)
    for number in range(1, 4):
        gate = asyncio.Semaphore(0)
        decode_engine.llm.scripts.append(Script(gate=gate))
        context = FakeContext()
        answering = asyncio.create_task(collect(answer, request(), context))
        await until(lambda number=number: len(kinds(decode_engine.llm)) == number)  # type: ignore[misc]
        context.stop()
        await answering
        for _ in range(2):  # now the KV is there, and the abort comes while the engine computes a token
            gate.release()
        await decode.idle()
        await until(lambda: not num_in_background())
        await decode.idle()
    assert kinds(decode_engine.llm) == ["generation_only"] * 3
    assert live.breaker.times_opened == 0
