"""What one request calls on its way: the picture in the documentation, and a budget of calls."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from types import AsyncGeneratorType
from typing import Any

import pytest

from benchmarks.calls import LONG, SHORT, count, ours
from tests.support.crossing import crossed
from tests.support.handling import ORDERS, collect, raw_request, request
from tests.support.recording_pair import make_pair, recording_engine
from tests.support.stage_client import FakeContext, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.handler import Handler
from trtllm_disagg.engines.recording.llm import Script
from trtllm_disagg.handlers.services import build_generate

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "structure.md"

#: Calls on both workers for an answer of 8 tokens, and for each further token: a tenth above what was counted.
MAX_CALLS = {"agg": (275, 5), "prefill_first": (760, 5), "decode_first": (795, 5), "router": (588, 5)}
MAX_GENERATORS = 5


@pytest.mark.parametrize("order", ORDERS)
async def test_the_picture_in_the_documentation_is_what_a_request_calls(order: str) -> None:
    generate = make_pair(order).generate
    for _ in range(3):  # the first one asks peers for their descriptions
        await collect(generate, request(8))
    picture = (await crossed(collect(generate, request(8)))).picture()
    assert picture in PAGE.read_text(), f"{PAGE.name} lacks, in {order}:\n{picture}"


@pytest.mark.parametrize("strategy", MAX_CALLS)
async def test_a_request_costs_no_more_calls_than_its_budget(strategy: str) -> None:
    short, long = [(await count(ours(strategy), tokens)).all for tokens in (SHORT, LONG)]
    most, max_per_token = MAX_CALLS[strategy]
    assert short <= most
    assert (long - short) / (LONG - SHORT) <= max_per_token


def generators_below(awaited: Any) -> Iterator[AsyncGeneratorType[Any, None]]:
    """Those that are suspended for one chunk, from the outside in."""
    while awaited is not None:
        if isinstance(awaited, AsyncGeneratorType):
            yield awaited
            awaited = awaited.ag_await
        elif inspect.iscoroutine(awaited):
            awaited = awaited.cr_await
        else:
            # What anext() and a generator's methods give has no such attribute.
            inner = [each for each in gc.get_referents(awaited) if isinstance(each, AsyncGeneratorType)]
            awaited = inner[0] if inner else None


async def test_a_token_passes_few_generators() -> None:
    engine, gate = recording_engine(), asyncio.Semaphore(1)
    engine.llm.scripts.append(Script(gate=gate))
    generate = build_generate(WorkerConfig(model="m", role=Role.AGG), engine, RecordingStageClient())
    handle = Handler(generate, dict).function
    async with aclosing(handle(raw_request(), FakeContext())) as answers:
        await anext(answers)
        waiting = asyncio.ensure_future(anext(answers))
        await asyncio.sleep(0)
        passed = [each.ag_code.co_qualname for each in generators_below(waiting.get_coro())]
        for _ in range(10):
            gate.release()
        await waiting
    assert 0 < len(passed) <= MAX_GENERATORS, passed
