"""Where a request must not wait for a prefill worker, it leaves the queue when there is none to answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.handling import request, until
from tests.support.queueing import Pushing, Queueing, blocked
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.errors import NoInstanceError
from trtllm_disagg.handlers.circuit_breaker import QUEUE_ID
from trtllm_disagg.handlers.peers import PREFILL
from trtllm_disagg.handlers.select import NoStage
from trtllm_disagg.prefill_queue.broker import QueueLimits
from trtllm_disagg.wire.bodies import encode_request


class Workers(NoStage):
    """The prefill workers in discovery."""

    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)
        self._looked = asyncio.Semaphore(0)

    def instance_ids(self) -> Sequence[int]:
        self._looked.release()
        return self.ids

    async def looked_at(self, times: int) -> None:
        """Until `instance_ids` was called so often."""
        for _ in range(times):
            await self._looked.acquire()


@pytest.fixture
def queue(queue: Queueing) -> Queueing:
    """Looks often, and takes a worker for lost after 0.3 s."""
    queue.limits = QueueLimits(look=0.01, beat=0.1)
    return queue


async def prefilled(pushing: Pushing) -> list[dict[str, Any]]:
    item = await pushing.client.pick(request())
    return [answer async for answer in item.call(encode_request(request(), PREFILL), None)]


async def requiring(queue: Queueing, workers: Workers) -> Pushing:
    pushing = await queue.pusher()
    pushing.client.require(workers)
    return pushing


async def test_prefill_queue_without_workers_raises_no_instance(queue: Queueing) -> None:
    pushing = await requiring(queue, Workers())
    with pytest.raises(NoInstanceError, match="no prefill worker is in discovery"):
        await pushing.client.pick(request())


async def test_a_request_in_the_queue_ends_when_the_last_prefill_worker_leaves(queue: Queueing) -> None:
    workers = Workers(1)
    pushing = await requiring(queue, workers)
    waiting = asyncio.create_task(prefilled(pushing))
    await workers.looked_at(times=3)
    assert not waiting.done()

    workers.ids.clear()

    async with asyncio.timeout(5):
        with pytest.raises(NoInstanceError, match="no prefill worker is in discovery") as raised:
            await waiting
    assert raised.value.peer == QUEUE_ID
    async with asyncio.timeout(5):
        while (await pushing.broker.waiting())[0]:  # it is withdrawn in the background
            pass


async def test_a_request_whose_prefill_worker_was_killed_ends_when_no_other_is_there(queue: Queueing) -> None:
    workers = Workers(1)
    pushing, dying = await requiring(queue, workers), await queue.puller(1)
    dying.llm.scripts.append(blocked()[0])
    waiting = asyncio.create_task(prefilled(pushing))
    await until(lambda: dying.llm.results)

    await dying.die()
    workers.ids.clear()

    async with asyncio.timeout(5):
        with pytest.raises(NoInstanceError, match="no prefill worker is in discovery") as raised:
            await waiting
    assert raised.value.peer == QUEUE_ID


async def test_a_request_that_a_leaving_prefill_worker_has_taken_is_answered(queue: Queueing) -> None:
    workers = Workers(1)
    pushing, leaving = await requiring(queue, workers), await queue.puller(1)
    script, gate = blocked()
    leaving.llm.scripts.append(script)
    waiting = asyncio.create_task(prefilled(pushing))
    await until(lambda: leaving.llm.results)
    stopping = asyncio.create_task(leaving.leave())
    workers.ids.clear()
    await asyncio.sleep(2 * queue.limits.silence)  # that nothing happens has no event

    gate.release()

    assert len(await waiting) == 1
    await stopping
    LLM.kv_store.clear()  # no decode takes it
