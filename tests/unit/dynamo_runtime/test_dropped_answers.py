"""Dynamo asks for an answer, and drops one with a client that has left, in threads of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

from tests.support.handling import raw_request
from tests.support.stage_client import FakeContext
from trtllm_disagg.dynamo_runtime.handler import as_dynamo_handler
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk


async def test_an_answer_that_is_dropped_in_a_thread_ends_on_the_event_loop() -> None:
    ended_in: list[int] = []
    has_ended = asyncio.Event()

    async def endless(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        try:
            yield TokenChunk([1])
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended_in.append(threading.get_ident())
            has_ended.set()

    handler = as_dynamo_handler(endless, dict)
    dynamos: list[Any] = []

    def ask() -> Any:
        # As Dynamo does it: the attribute, once.
        dynamos.append(handler(raw_request(), FakeContext()).__anext__)
        return dynamos[0]()

    first = await (await asyncio.to_thread(ask))
    assert first["token_ids"] == [1]
    await asyncio.to_thread(dynamos.clear)
    await asyncio.wait_for(has_ended.wait(), 10)
    assert ended_in == [threading.get_ident()]
