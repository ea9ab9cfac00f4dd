"""Requests of a worker that ends: waited for, then handed back, and never ended as if their client had left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from tests.support.handling import collect, request, tokens_of, until
from tests.support.stage_client import FakeContext
from tests.support.trying import counts_of, tracked, trying
from trtllm_disagg.errors import EngineError, WorkerLeavingError
from trtllm_disagg.handlers.attempts import Attempt
from trtllm_disagg.handlers.drain import WorkerDrain
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

LAST = TokenChunk([9], finish_reason="stop")


class Stream:
    """A Generate that gives one token, and a last one when `go_on` is set."""

    def __init__(self, last: TokenChunk | None = LAST) -> None:
        self.go_on = asyncio.Event()
        self.was_closed = False
        self._last = last

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        try:
            yield TokenChunk([1])
            await self.go_on.wait()
            if self._last is not None:
                yield self._last
        finally:
            self.was_closed = True


class Client:
    """Reads an answer as Dynamo does: each chunk in a task of its own."""

    def __init__(self, generate: Generate, context: FakeContext | None = None) -> None:
        self.tokens: list[int] = []
        self._chunks = generate(request(), context or FakeContext())

    async def read(self) -> None:
        while True:
            try:
                chunk = await asyncio.create_task(anext(self._chunks))
            except StopAsyncIteration:
                return
            self.tokens += chunk.token_ids


async def test_leaving_worker_finishes_running_and_new_requests() -> None:
    drain, stream = WorkerDrain(), Stream()
    generate = tracked(drain, stream)
    first = Client(generate)
    reading = asyncio.create_task(first.read())
    await until(lambda: first.tokens)
    assert drain.num_running == 1
    drain.begin("SIGTERM or SIGINT")
    quiet = asyncio.create_task(drain.none_runs())
    stream.go_on.set()
    await reading
    assert first.tokens == [1, 9]
    assert tokens_of(await collect(generate, request())) == [1, 9]
    await quiet
    assert drain.num_running == 0


async def test_a_request_that_still_runs_at_the_end_is_handed_back() -> None:
    drain, stream = WorkerDrain(), Stream()
    client = Client(tracked(drain, stream))
    reading = asyncio.create_task(client.read())
    await until(lambda: client.tokens)
    drain.begin("SIGTERM or SIGINT")
    await drain.cut()
    with pytest.raises(WorkerLeavingError, match="this worker is leaving: SIGTERM or SIGINT"):
        await reading
    assert client.tokens == [1]
    assert stream.was_closed
    assert drain.num_running == 0


async def test_a_request_with_a_slow_client_is_handed_back_with_its_next_token() -> None:
    drain, stream = WorkerDrain(), Stream()
    chunks = tracked(drain, stream)(request(), FakeContext())
    assert (await anext(chunks)).token_ids == [1]
    drain.begin("its engine died")
    cutting = asyncio.create_task(drain.cut())
    await asyncio.sleep(0)
    with pytest.raises(WorkerLeavingError):
        await anext(chunks)
    await cutting


async def test_a_request_of_a_worker_that_is_over_is_tried_nowhere_else() -> None:
    drain, stream, other = WorkerDrain(), Stream(), Stream()
    attempts = [Attempt("first", stream), Attempt("other_stage", other, without_engine=True)]
    chunks = trying(attempts, counts=counts_of(drain=drain))(request(), FakeContext())
    await anext(chunks)
    drain.begin("its engine died")
    cutting = asyncio.create_task(drain.cut())
    await asyncio.sleep(0)
    stream.go_on.set()
    with pytest.raises(WorkerLeavingError):
        await anext(chunks)
    await cutting
    assert not other.was_closed, "it was never begun"


async def test_finished_answer_is_not_cut_at_the_end_of_the_drain() -> None:
    drain, stream = WorkerDrain(), Stream()
    stream.go_on.set()
    chunks = tracked(drain, stream)(request(), FakeContext())
    seen = [await anext(chunks), await anext(chunks)]
    drain.begin("its engine died")
    cutting = asyncio.create_task(drain.cut())
    await asyncio.sleep(0)
    seen += [chunk async for chunk in chunks]
    await cutting
    assert tokens_of(seen) == [1, 9]


async def test_a_request_that_comes_after_the_end_goes_elsewhere() -> None:
    drain = WorkerDrain()
    drain.begin("SIGTERM or SIGINT")
    await drain.cut()
    with pytest.raises(WorkerLeavingError):
        await collect(tracked(drain, Stream()), request())


async def test_answer_without_finish_reason_raises_only_while_the_worker_leaves() -> None:
    """A runtime that is shut down stops the contexts of all requests, and strategies end for that without a word."""
    drain, stream, context = WorkerDrain(), Stream(last=None), FakeContext()
    stream.go_on.set()
    generate = tracked(drain, stream)
    assert tokens_of(await collect(generate, request())) == [1], "its client left"
    drain.begin("its engine died")
    context.stop()
    with pytest.raises(WorkerLeavingError):
        await collect(generate, request(), context)


async def test_a_cancelled_request_is_cancelled_and_not_handed_back() -> None:
    drain, stream = WorkerDrain(), Stream()
    client = Client(tracked(drain, stream))
    reading = asyncio.create_task(client.read())
    await until(lambda: client.tokens)
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    assert reading.cancelled()
    await until(lambda: drain.num_running == 0)


async def test_drain_passes_on_other_errors_unchanged() -> None:
    async def fails(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk([1])
        raise EngineError("boom")

    drain = WorkerDrain()
    with pytest.raises(EngineError, match="boom"):
        await collect(tracked(drain, fails), request())
    assert drain.num_running == 0
