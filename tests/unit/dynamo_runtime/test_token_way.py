"""How many async generators a token passes between the engine's result and Dynamo's request plane."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from types import AsyncGeneratorType
from typing import Any

import pytest

from tests.support.handling import raw_request, until
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import FakeContext, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.discovery import DynamoStageInstance
from trtllm_disagg.dynamo_runtime.handler import as_dynamo_handler
from trtllm_disagg.engines.recording.llm import Script
from trtllm_disagg.handlers.admission import Admission
from trtllm_disagg.handlers.remote import NoStage, StageClient
from trtllm_disagg.handlers.select import InFlight, RoundRobin, SelectedStage
from trtllm_disagg.handlers.services import LiveState, build_generate
from trtllm_disagg.handlers.trace import with_request_log
from trtllm_disagg.wire.bodies import decode_request, encode_chunk

MOST_GENERATORS = 6


class Answers:
    """Chunks of the other worker as Dynamo's Rust stream has them: an iterator, no generator. Nothing after one."""

    def __init__(self, chunks: AsyncGenerator[Any, None] | None) -> None:
        self._chunks = chunks
        self._count = 0

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> dict[str, Any]:
        self._count += 1
        if self._chunks is None:
            if self._count > 1:
                await asyncio.Event().wait()
            return {"token_ids": [7]}
        return encode_chunk(await anext(self._chunks))


class DynamoClient:
    """The other worker: gives one token and then nothing more, or serves a prefill."""

    def __init__(self, role: Role, strategy: str) -> None:
        self._serve = None
        if role is Role.PREFILL:
            config = WorkerConfig(model="m", role=role, strategy=strategy)
            self._serve = build_generate(config, recording_engine(), NoStage())

    def instance_ids(self) -> list[int]:
        return [1]

    def instance(self, instance_id: int) -> DynamoStageInstance:
        return DynamoStageInstance(self, instance_id)

    async def direct(
        self, request: dict[str, Any], instance_id: int, annotated: bool, context: Any
    ) -> Answers:
        return Answers(None if self._serve is None else self._serve(decode_request(request), context))


def generators_below(awaited: Any) -> Iterator[AsyncGeneratorType[Any, None]]:
    """Those that are suspended for one element, from the outside in."""
    while awaited is not None:
        if isinstance(awaited, AsyncGeneratorType):
            yield awaited
            awaited = awaited.ag_await
        elif inspect.iscoroutine(awaited):
            awaited = awaited.cr_await
        else:
            held = gc.get_referents(awaited)
            held += [value for each in held if isinstance(each, dict) for value in each.values()]
            awaited = next((each for each in held if isinstance(each, AsyncGeneratorType)), None)


def stage_of(role: Role, strategy: str) -> StageClient:
    client = DynamoClient(role, strategy)
    in_flight = InFlight()
    return SelectedStage(client, RoundRobin(), in_flight, role.value)


def served(config: WorkerConfig, engine: Any, stage: StageClient) -> Any:
    """As a worker composes it."""
    live = LiveState.of(config, config.kv_block_size)
    generate = with_request_log(build_generate(config, engine, stage, live), lambda: "part", live.sinks)
    generate = Admission(live.thresholds, live.queued).admitting(generate)
    return as_dynamo_handler(generate, dict)


@pytest.mark.parametrize(
    ("role", "strategy"),
    [
        (Role.AGG, "decode_first"),
        (Role.PREFILL, "prefill_first"),
        (Role.DECODE, "decode_first"),
        (Role.DECODE, "auto"),
    ],
)
async def test_a_token_passes_at_most_six_generators(
    role: Role, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="trtllm_disagg")
    gate = asyncio.Semaphore(2)
    engine = recording_engine()
    engine.llm.scripts.append(Script(gate=gate))
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    stage = stage_of(other, strategy) if role is not Role.AGG else RecordingStageClient()
    # Longer prompts than this cross to the other stage under auto too.
    crossing: dict[str, Any] = {} if role is Role.AGG else {"thresholds": {"max_local_prefill_length": 100}}
    config = WorkerConfig(model="m", role=role, strategy=strategy, **crossing)

    asked = raw_request(token_ids=list(range(2000))[:200])
    async with aclosing(served(config, engine, stage)(asked, FakeContext())) as chunks:
        assert (await anext(chunks))["token_ids"]
        assert (await anext(chunks))["token_ids"]
        third = asyncio.ensure_future(anext(chunks))
        passed: list[str] = []

        def waits_for_the_engine() -> bool:
            passed[:] = [each.__qualname__ for each in generators_below(chunks)]
            return passed[-1].endswith(("newest_states", "DynamoStageInstance.call"))

        await until(waits_for_the_engine)
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
    assert len(passed) <= MOST_GENERATORS, passed
    crossed = strategy if role is not Role.AGG else "agg"
    assert f'"strategy": "{"decode_first" if crossed == "auto" else crossed}"' in caplog.text
