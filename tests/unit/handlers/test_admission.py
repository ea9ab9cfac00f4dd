"""What is refused at the worker, what is not, and that what waited is counted to the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from tests.support.handling import collect, request
from tests.support.stage_client import FakeContext
from tests.support.trying import admitted
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import EngineError, OverloadedError
from trtllm_disagg.handlers.admission import Admission
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


class Engine:
    """Answers with two chunks, each when the test says so."""

    def __init__(self) -> None:
        self.started = 0
        self.gates = [asyncio.Event(), asyncio.Event()]

    async def generate(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        self.started += 1
        for gate in self.gates:
            await gate.wait()
            yield TokenChunk([1])


class AdmittingWorker:
    def __init__(self, **bounds: Any) -> None:
        self.live = LiveState.of(WorkerConfig(model="m", role=Role.AGG, **bounds), 32)
        self.engine = Engine()
        admission = Admission(self.live.thresholds, self.live.queued)
        self.generate: Generate = admitted(admission, self.engine.generate)

    @property
    def queued(self) -> tuple[int, int]:
        return self.live.queued.requests, self.live.queued.tokens

    async def start(self, num_tokens: int = 10) -> AsyncGenerator[TokenChunk, None]:
        """One that waits for its first chunk."""
        running = self.generate(request(token_ids=[5] * num_tokens), FakeContext())
        self.waiting = asyncio.ensure_future(anext(running))
        await asyncio.sleep(0)
        return running

    async def refusal(self, num_tokens: int = 10) -> str:
        started = self.engine.started
        with pytest.raises(OverloadedError) as caught:
            await collect(self.generate, request(token_ids=[5] * num_tokens))
        assert self.engine.started == started, "before any work"
        return str(caught.value)


async def test_requests_beyond_max_queued_requests_are_refused_before_any_work_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = AdmittingWorker(max_queued_requests=5)
    await worker.start()
    await worker.start()
    assert worker.live.set_thresholds({"max_queued_requests": 2}, "set") == ["max_queued_requests: 5 -> 2"]
    said = [await worker.refusal() for _ in range(50)]
    assert said[0].startswith("overloaded: 2 requests with 20 prompt tokens ")
    assert "--max-queued-requests 2" in said[0]
    assert worker.queued == (2, 20)
    assert worker.live.queued.num_refused == 50
    assert caplog.text.count("overloaded:") == 1


async def test_request_with_a_first_token_no_longer_counts_as_queued() -> None:
    worker = AdmittingWorker(max_queued_requests=1)
    running = await worker.start()
    await worker.refusal()
    worker.engine.gates[0].set()
    await worker.waiting
    assert worker.queued == (0, 0)
    async with aclosing(running):
        await worker.start()
    assert worker.queued == (0, 0)


async def test_prompt_tokens_are_bounded_but_one_prompt_may_be_of_any_length() -> None:
    worker = AdmittingWorker(max_queued_tokens=100)
    running = await worker.start(500)
    assert "--max-queued-tokens 100" in await worker.refusal(1)
    worker.engine.gates[0].set()
    await worker.waiting
    await running.aclose()
    worker.engine.gates[0].clear()
    await worker.start(60)
    await worker.start(40)
    await worker.refusal(1)


async def test_bounds_of_zero_refuse_no_request() -> None:
    worker = AdmittingWorker(max_queued_requests=0, max_queued_tokens=0)
    for _ in range(400):
        await worker.start(1000)
    assert worker.queued == (400, 400_000)


@pytest.mark.parametrize("end", ["cancelled", "failed", "closed"])
async def test_admission_room_is_released_on_token_error_and_cancel(end: str) -> None:
    worker = AdmittingWorker(max_queued_requests=1)

    async def fails(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in worker.engine.generate(request, context):
            if chunk.token_ids:
                raise EngineError("broken")
            yield chunk

    admission = Admission(worker.live.thresholds, worker.live.queued)
    running = admitted(admission, fails)(request(), FakeContext())
    waiting = asyncio.ensure_future(anext(running))
    await asyncio.sleep(0)
    assert worker.queued[0] == 1
    if end == "failed":
        worker.engine.gates[0].set()
    else:
        waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await running.aclose()
    assert worker.queued == (0, 0)


@pytest.mark.parametrize(
    ("settings", "requests", "tokens"),
    [
        ({"max_batch_size": 8, "max_num_tokens": 512}, 256, 131_072),
        ({"max_batch_size": 128, "max_num_tokens": 512}, 512, 262_144),
        ({"max_batch_size": 128, "max_queued_requests": 10, "max_queued_tokens": 0}, 10, 0),
        ({"max_batch_size": 8, "max_num_tokens": 64, "max_queued_requests": 1000}, 1000, 64_000),
        ({"max_batch_size": 8, "max_num_tokens": 64, "max_queued_requests": 0}, 0, 16_384),
    ],
)
def test_default_admission_bounds_follow_the_batch_size(
    settings: dict[str, Any], requests: int, tokens: int
) -> None:
    limits = LiveState.of(WorkerConfig(model="m", **settings), 32).thresholds.value
    assert (limits["max_queued_requests"], limits["max_queued_tokens"]) == (requests, tokens)
