"""When `auto` sends a request on: while this worker's engine decodes all it has room for, whatever runs elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.support.handling import collect, request, until
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import FakeContext, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import NoInstanceError, OverloadedError
from trtllm_disagg.handlers.selection import NoStage, StageClient, StageInstance
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

pytestmark = pytest.mark.usefixtures("no_leaks")

PROMPT = list(range(1, 40))
ROOM = 2
FULL = 2


def worker(
    role: Role, peers: StageClient, instance_id: int, engine: Engine | None = None, **settings: Any
) -> Generate:
    given: dict[str, Any] = {"max_batch_size": ROOM, "thresholds": {"max_local_prefill_length": 8}} | settings
    config = WorkerConfig(model="org/model", strategy="auto", role=role, **given)
    return build_generate(config, engine or recording_engine(), peers, instance_id=instance_id)


def workers_of_auto(to_decode: RecordingStageClient) -> tuple[Generate, Generate]:
    """A prefill worker and a decode worker, which call each other."""
    to_prefill = RecordingStageClient()
    prefill, decode = worker(Role.PREFILL, to_decode, 1), worker(Role.DECODE, to_prefill, FULL)
    to_decode.serve, to_prefill.serve = decode, prefill
    return prefill, decode


async def begun(generate: Generate, **keys: Any) -> tuple[GenerateRequest, AsyncGenerator[TokenChunk, None]]:
    """A long answer of which the first chunks have come, the second stage's among them."""
    asked = request(400, token_ids=PROMPT, **keys)
    chunks = generate(asked, FakeContext())
    await anext(chunks)
    await anext(chunks)
    return asked, chunks


def way_of(asked: GenerateRequest) -> tuple[str, str]:
    return asked.trace.strategy, asked.trace.reason


async def test_auto_uses_the_other_order_when_the_batch_is_full() -> None:
    _, decode = workers_of_auto(RecordingStageClient())
    own = [await begun(decode) for _ in range(ROOM)]
    sent_on = await begun(decode)
    assert [way_of(asked) for asked, _ in own] == [("decode_first", "auto_long")] * ROOM
    assert way_of(sent_on[0]) == ("prefill_first", "auto_busy")
    for _, chunks in [*own, sent_on]:
        await chunks.aclose()


class NoWorkers(NoStage):
    async def pick(self, request: GenerateRequest) -> StageInstance:
        raise NoInstanceError("no worker is there")


class TwoDecodeWorkers(RecordingStageClient):
    """The second one is idle. Both are served by the same engine, for only the choice counts here."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = [FULL, FULL + 1]
        self.chosen: list[int] = []

    def instance_ids(self) -> list[int]:
        return self.ids

    async def pick(self, request: GenerateRequest) -> RecordingStageClient:
        possible = [each for each in self.ids if each not in request.avoid]
        self.chosen.append(next((each for each in possible if each not in request.skipped), possible[0]))
        return self


async def test_a_full_decode_worker_gets_back_what_it_sent_on_only_without_another_one() -> None:
    to_decode = TwoDecodeWorkers()
    _, decode = workers_of_auto(to_decode)
    running = [await begun(decode) for _ in range(ROOM + 1)]
    assert (way_of(running[-1][0]), to_decode.chosen) == (("prefill_first", "auto_busy"), [FULL + 1])

    asked_for = await begun(decode, annotations=["disagg:prefill_first"])
    assert to_decode.chosen == [FULL + 1, FULL], "a request that asks for that order may be decoded here"

    to_decode.ids = [FULL]
    alone = await begun(decode)
    assert (way_of(alone[0]), to_decode.chosen[2:]) == (("prefill_first", "auto_busy"), [FULL])
    for _, chunks in [*running, asked_for, alone]:
        await chunks.aclose()


async def test_requests_that_were_sent_on_to_another_worker_take_no_room_here() -> None:
    prefill, _ = workers_of_auto(RecordingStageClient())
    decode = worker(Role.DECODE, RecordingStageClient(prefill), 3)
    own = [await begun(decode) for _ in range(ROOM)]
    sent_on = [await begun(decode) for _ in range(ROOM)]
    assert [way_of(asked) for asked, _ in sent_on] == [("prefill_first", "auto_busy")] * ROOM
    for _, chunks in own:
        await chunks.aclose()
    after = await begun(decode)
    assert way_of(after[0]) == ("decode_first", "auto_long")
    for _, chunks in [*sent_on, after]:
        await chunks.aclose()


async def test_a_request_with_both_phases_at_once_takes_one_place() -> None:
    """Under generation_first this worker's engine has it before the first token is there."""

    over = asyncio.Event()

    async def silent(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        await over.wait()
        yield TokenChunk([])

    to_prefill = RecordingStageClient(silent, description={"ctx_info_endpoint": "tcp://prefill:1"})
    engine = recording_engine()
    decode = worker(Role.DECODE, to_prefill, 2, engine, schedule_style=ScheduleStyle.GENERATION_FIRST)
    asked = [request(400, token_ids=PROMPT) for _ in range(ROOM)]
    waiting = [asyncio.create_task(collect(decode, asked[0]))]
    await until(lambda: engine.llm.results)
    waiting.append(asyncio.create_task(collect(decode, asked[1])))
    await until(lambda: asked[1].trace.reason)
    assert [way_of(each) for each in asked] == [("decode_first", "auto_long")] * ROOM
    over.set()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await to_prefill.idle()


def worker_without_peers(**settings: Any) -> Generate:
    return worker(Role.DECODE, NoWorkers(), 2, max_batch_size=8, **settings)


async def test_without_peers_a_long_prompt_fails_if_no_worker_may_answer_alone() -> None:
    asked = request(token_ids=PROMPT)
    with pytest.raises(NoInstanceError):
        await collect(worker_without_peers(on_missing_stage="fail"), asked)
    assert way_of(asked) == ("decode_first", "auto_no_peer")


async def test_without_peers_long_prompts_are_a_fallback_and_have_its_budget() -> None:
    """TrtllmDisaggServesAlone asks for the step, whatever the order is."""
    decode = worker_without_peers(max_local_fallbacks=1)
    asked, chunks = await begun(decode)
    assert way_of(asked) == ("local", "auto_no_peer")
    assert asked.trace.steps == [("local", "NoInstanceError")]
    with pytest.raises(OverloadedError, match="--max-local-fallbacks 1"):
        await collect(decode, request(token_ids=PROMPT))
    short = request(token_ids=PROMPT[:8])
    await collect(decode, short)
    assert short.trace.steps == []
    await chunks.aclose()


async def test_decodes_that_prefill_workers_ask_for_take_room_here() -> None:
    to_decode = RecordingStageClient()
    prefill, decode = workers_of_auto(to_decode)
    theirs = [await begun(prefill, annotations=["disagg:prefill_first"]) for _ in range(ROOM)]
    asked, chunks = await begun(decode)
    assert way_of(asked) == ("prefill_first", "auto_busy")
    for _, each in [*theirs, (asked, chunks)]:
        await each.aclose()
    await to_decode.idle()
    asked, chunks = await begun(decode)
    assert way_of(asked) == ("decode_first", "auto_long")
    await chunks.aclose()
