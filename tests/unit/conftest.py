"""What must be as it was after a test."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from tests.conftest import Checkpoints
from tests.support.loop_lag import loop_never_stands_still
from tests.support.mounted_recording import mounted_recording_llm
from tests.support.nats_server import NatsServer, nats_server
from tests.support.queueing import Queueing, queueing
from tests.support.recording_pair import leftover_tasks
from trtllm_disagg.engines.embedded import LLM as EmbeddedLLM
from trtllm_disagg.engines.recording.llm import LLM

# How long an example takes says more about the machine than about the code.
settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")


_MAX_LOOKS = 40


@pytest.fixture
async def no_leaks() -> AsyncIterator[None]:
    """No KV waits for a decode, and no task runs, once a test's requests are over."""
    LLM.forget_instances()
    yield
    # A worker that pushes its answers hears later that its caller has left.
    for _ in range(_MAX_LOOKS):
        if not (left := await leftover_tasks()):
            break
    kept = len(LLM.kv_store)
    LLM.forget_instances()
    assert left == set()
    assert kept == 0


#: What a request passes on TensorRT-LLM, from the endpoint to the engine. (Tests of the prefill queue start servers.)
TRTLLM_PATH = ("dynamo_runtime", "engine", "handlers", "wire", "worker")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every asynchronous test of that path has the event loop watched."""
    here = Path(__file__).parent
    for item in items:
        if (
            item.path.is_relative_to(here)
            and item.path.relative_to(here).parts[0] in TRTLLM_PATH
            and isinstance(item, pytest.Function)
            and inspect.iscoroutinefunction(item.function)
        ):
            item.fixturenames.append("the_loop_goes_on")


@pytest.fixture
async def the_loop_goes_on() -> AsyncIterator[None]:
    """No call keeps the event loop waiting."""
    async with loop_never_stands_still():
        yield


@pytest.fixture
def tensorrt_llm() -> Iterator[ModuleType]:
    """`import tensorrt_llm` gives the recording stand-in."""
    with mounted_recording_llm() as module:
        yield module


@pytest.fixture(scope="session")
def embedded_llm(checkpoints: Checkpoints) -> Iterator[EmbeddedLLM]:
    """An engine process without a transport, shared by tests that leave it as it was."""
    with EmbeddedLLM(
        checkpoints(),
        kv_cache_config={"max_tokens": 4096},
        max_seq_len=512,
        max_batch_size=4,
        max_num_tokens=96,
    ) as llm:
        yield llm


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One for all tests; a test that kills it starts it again."""
    with nats_server(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
async def queue(nats: NatsServer, no_leaks: None) -> AsyncIterator[Queueing]:
    """A prefill queue of its own, under decode_first."""
    async with queueing(nats) as opened:
        yield opened
