"""An instance that comes later and does not fit is not called; and a queue without workers is no way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import pytest

from tests.support.handling import request
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError, NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.remote import QUEUE_ID
from trtllm_disagg.handlers.select import CompatibilityFilter, RequireConsumers
from trtllm_disagg.types import GenerateRequest, RequestContext
from trtllm_disagg.worker.pairing import Fingerprint, ModelIdentity, describe_worker, require_callable


def described(role: str = "prefill", weights: str = "aaaa", **settings: Any) -> dict[str, Any]:
    config = WorkerConfig(model="m", engine="embedded", role=Role(role), **settings)
    return describe_worker(config, Fingerprint.of("embedded", {}, 32), ModelIdentity("m", "m", weights))


class Instance:
    def __init__(self, instance_id: int, said: dict[str, Any] | Exception | None) -> None:
        self.instance_id = instance_id
        self.said = said
        self.times_asked = 0

    async def describe(self) -> dict[str, Any]:
        self.times_asked += 1
        if self.said is None:
            await asyncio.Event().wait()
        if isinstance(self.said, Exception):
            raise self.said
        assert self.said is not None
        return self.said

    async def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        yield {}

    async def notify(self, notice: dict[str, Any]) -> None:
        """Nothing is told."""


class Stage:
    """The first instance that is allowed."""

    def __init__(self, *said: dict[str, Any] | Exception | None) -> None:
        self.instances = {i: Instance(i, each) for i, each in enumerate(said)}
        self._looked = asyncio.Semaphore(0)

    def instance_ids(self) -> Sequence[int]:
        self._looked.release()
        return list(self.instances)

    async def looked_at(self, times: int) -> None:
        """Until `instance_ids` was called so often."""
        for _ in range(times):
            await self._looked.acquire()

    def check(self, request: GenerateRequest) -> None:
        """No instance is wished for."""

    async def pick(self, request: GenerateRequest) -> Instance:
        for instance_id, instance in self.instances.items():
            if instance_id not in request.avoid:
                return instance
        raise NoInstanceError("none")


def fitting_stage(stage: Stage, **settings: float) -> CompatibilityFilter:
    return CompatibilityFilter(stage, partial(require_callable, described("decode")), **settings)


async def test_incompatible_instance_is_skipped_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(described(weights="bbbb"), described())
    fits = fitting_stage(stage)
    with caplog.at_level(logging.ERROR):
        picked = [(await fits.pick(request())).instance_id for _ in range(3)]
    assert picked == [1, 1, 1]
    assert fits.instance_ids() == [1]
    assert [each.times_asked for each in stage.instances.values()] == [1, 1]
    (record,) = caplog.records
    assert "instance 0 is not called: the two stages do not fit together; --model" in record.getMessage()


async def test_without_a_fitting_instance_there_is_no_instance() -> None:
    fits = fitting_stage(Stage(described(weights="bbbb"), described(weights="cccc")))
    with pytest.raises(NoInstanceError):
        await fits.pick(request())
    assert fits.instance_ids() == []


async def test_while_a_deployment_switches_its_workers_have_two_strategies() -> None:
    other = described(strategy="prefill_first")
    assert (await fitting_stage(Stage(other)).pick(request())).instance_id == 0
    with pytest.raises(ConfigError, match="both workers are decode"):
        require_callable(described("decode"), described("decode"))


async def test_an_instance_without_a_description_is_asked_again() -> None:
    stage = Stage(None)
    fits = fitting_stage(stage, describe_seconds=0.01)
    for said in (None, PeerUnavailableError("gone")):
        stage.instances[0].said = said
        assert (await fits.pick(request())).instance_id == 0
    stage.instances[0].said = described(weights="bbbb")
    with pytest.raises(NoInstanceError):
        await fits.pick(request())


async def test_an_instance_that_is_gone_is_forgotten() -> None:
    stage = Stage(described(weights="bbbb"), described())
    fits = fitting_stage(stage)
    await fits.pick(request())
    stage.instances = {2: Instance(2, described())}
    await fits.pick(request())
    assert list(fits.fitting) == [2]


async def test_prefill_queue_without_workers_raises_no_instance() -> None:
    queue, workers = RecordingStageClient(), Stage()
    attended = RequireConsumers(queue, workers)
    with pytest.raises(NoInstanceError, match="no prefill worker is in discovery"):
        await attended.pick(request())
    workers.instances = {0: Instance(0, None)}
    assert (await attended.pick(request())).instance_id == queue.instance_id


class QueuedItem(RecordingStageClient):
    """Answers when its event is set. `instance_id` is the worker that has taken it, if one has."""

    def __init__(self, instance_id: int) -> None:
        super().__init__()
        self.instance_id = instance_id
        self.is_answered = asyncio.Event()
        self.has_ended = False

    async def call(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        try:
            await self.is_answered.wait()
            yield {"token_ids": [7]}
        finally:
            self.has_ended = True


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_disagg.handlers.select._LOOK_SECONDS", 0.001)


async def answers_of(attended: RequireConsumers) -> list[dict[str, Any]]:
    item = await attended.pick(request())
    return [answer async for answer in item.call({}, None)]


@pytest.mark.usefixtures("looks_often")
async def test_a_request_in_the_queue_ends_when_the_last_prefill_worker_leaves() -> None:
    item, workers = QueuedItem(QUEUE_ID), Stage(None)
    waiting = asyncio.create_task(answers_of(RequireConsumers(item, workers)))
    await workers.looked_at(times=3)
    assert not waiting.done()

    workers.instances.clear()

    with pytest.raises(NoInstanceError, match="no prefill worker is in discovery") as raised:
        await waiting
    assert raised.value.peer == QUEUE_ID
    assert item.has_ended


@pytest.mark.usefixtures("looks_often")
async def test_a_request_that_a_leaving_prefill_worker_has_taken_is_answered() -> None:
    item, workers = QueuedItem(5), Stage(None)
    waiting = asyncio.create_task(answers_of(RequireConsumers(item, workers)))
    await workers.looked_at(times=1)
    workers.instances.clear()
    await asyncio.sleep(0.02)  # that nothing happens has no event

    item.is_answered.set()

    assert await waiting == [{"token_ids": [7]}]


@pytest.mark.usefixtures("looks_often")
async def test_a_cancelled_request_in_the_queue_is_cancelled() -> None:
    item, workers = QueuedItem(QUEUE_ID), Stage(None)
    waiting = asyncio.create_task(answers_of(RequireConsumers(item, workers)))
    await workers.looked_at(times=2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert item.has_ended
