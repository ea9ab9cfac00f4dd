"""An engine that stands still and says that it is well: nothing comes, of any of the requests that run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.handling import request
from tests.support.recording_pair import leftover_tasks, recording_engine
from tests.support.stage_client import FakeContext
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.health import Stall, until_stalled
from trtllm_disagg.engines.recording.llm import LLM, Script
from trtllm_disagg.errors import EngineError
from trtllm_disagg.handlers.local import LocalAgg


@pytest.fixture
def engine() -> Iterator[Engine]:
    yield recording_engine()
    LLM.forget_instances()


class Running:
    """A request of three tokens, each of which waits for a permit."""

    def __init__(self, engine: Engine) -> None:
        self.permits = asyncio.Semaphore(0)
        engine.llm.scripts.append(Script(gate=self.permits))
        self.task = asyncio.create_task(engine.finished(engine.start_agg(request(max_tokens=3))))

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.permits.release()
        await leftover_tasks()


async def looks(stall: Stall) -> int:
    await leftover_tasks()
    stall.look()
    return stall.num_looks


async def test_stall_counts_looks_without_output_while_requests_run(engine: Engine) -> None:
    stall = Stall(engine)
    assert await looks(stall) == 0, "nothing runs"
    running = Running(engine)
    assert [await looks(stall) for _ in range(3)] == [1, 2, 3]
    await running.step()
    assert [await looks(stall) for _ in range(2)] == [0, 1]
    await running.step(2)
    await running.task
    assert [await looks(stall) for _ in range(2)] == [0, 0]


async def test_only_output_and_failures_reset_the_stall_count(engine: Engine) -> None:
    stall, first = Stall(engine), Running(engine)
    assert await looks(stall) == 1
    second = Running(engine)
    assert await looks(stall) == 2
    first.task.cancel()
    assert await looks(stall) == 3
    await second.step()
    assert [await looks(stall) for _ in range(2)] == [0, 1]
    engine.llm.scripts.append(Script(error=RuntimeError("bad request")))
    with pytest.raises(EngineError, match="bad request"):
        await engine.finished(engine.start_agg(request()))
    assert await looks(stall) == 0
    second.task.cancel()
    await leftover_tasks()


async def test_an_ended_request_whose_client_does_not_read_is_no_stall(engine: Engine) -> None:
    stall, chunks = Stall(engine), LocalAgg(engine)(request(max_tokens=3), FakeContext())
    await anext(chunks)
    assert [await looks(stall) for _ in range(3)] == [0, 0, 0]
    assert not engine.has_requests()
    await chunks.aclose()


async def test_stall_reason_names_the_flag(engine: Engine) -> None:
    still = Running(engine)
    async with asyncio.timeout(30):
        assert "(--engine-stall-timeout)" in await until_stalled(engine, 0.01)
    still.task.cancel()
    await leftover_tasks()


@pytest.mark.parametrize(
    ("engine_name", "given", "seconds"),
    [
        ("tensorrt_llm", None, 600.0),
        ("embedded", None, 0.0),
        ("embedded", 9.0, 9.0),
        ("tensorrt_llm", 0.0, 0.0),
    ],
)
def test_stall_timeout_defaults_to_off_for_engines_that_watch_their_steps(
    engine_name: str, given: float | None, seconds: float
) -> None:
    config = WorkerConfig(model="org/model", engine=engine_name, engine_stall_timeout=given)
    assert config.stall_seconds == seconds
