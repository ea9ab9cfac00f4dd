"""Dynamo's routers hear from this worker when a request has left its prefill behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.support.handling import raw_request
from tests.support.stage_client import FakeContext
from trtllm_disagg.dynamo_runtime.handler import as_dynamo_handler
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk


class Context(FakeContext):
    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[int | None] = []
        #: How many chunks had been handed on at each notice.
        self.notices: list[int] = []
        self.num_chunks = 0

    def notify_first_token(self) -> None:
        self.notices.append(self.num_chunks)


class Source:
    def bind(self, context: Any, dp_rank: int | None) -> None:
        context.ranks.append(dp_rank)


async def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
    for tokens in ([], [5], [6]):
        yield TokenChunk(tokens)


async def served(raw: dict[str, Any], source: Source | None) -> Context:
    context = Context()
    handler = as_dynamo_handler(answer, dict, first_tokens=source)
    async for _ in handler(raw, context):
        context.num_chunks += 1
    assert context.num_chunks == 3
    return context


async def test_request_is_bound_to_its_rank_and_the_first_token_is_notified_once() -> None:
    context = await served(raw_request(routing={"dp_rank": 3}), Source())
    assert (context.ranks, context.notices) == ([3], [2]), "behind the chunk that has it"


async def test_answer_of_one_chunk_ends_without_a_notice() -> None:
    async def at_once(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk([5], finish_reason="length")

    context = Context()
    async for _ in as_dynamo_handler(at_once, dict, first_tokens=Source())(raw_request(), context):
        pass
    assert (context.ranks, context.notices) == ([None], [])


@pytest.mark.parametrize("stage", ["prefill", "decode", "whole"])
async def test_first_token_of_a_phase_request_is_not_notified(stage: str) -> None:
    context = await served(raw_request(errand={"stage": stage}), Source())
    assert (context.ranks, context.notices) == ([], [])


async def test_without_a_source_the_frontend_finds_out_by_itself() -> None:
    context = await served(raw_request(), None)
    assert (context.ranks, context.notices) == ([], [])
