"""What waits in the prefill queue: for room, until its client leaves, or too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.handling import PROMPT, collect, expected_tokens, request, tokens_of, until
from tests.support.queueing import Pushing, Queueing, begun, blocked
from tests.support.stage_client import FakeContext
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.errors import NoInstanceError, RequestCancelledError, StageTimeoutError
from trtllm_disagg.handlers.circuit_breaker import QUEUE_ID
from trtllm_disagg.handlers.peers import PREFILL
from trtllm_disagg.handlers.select import NoStage
from trtllm_disagg.prefill_queue.broker import QueueLimits
from trtllm_disagg.wire.bodies import encode_request


async def depth_is(queue: Queueing, depth: int) -> None:
    await until(lambda: queue.pushers[0].watch.depth() == depth)


@pytest.mark.parametrize("room", [{"max_items": 2}, {"max_tokens": len(PROMPT) + 1}])
async def test_a_worker_never_takes_more_than_it_has_room_for(queue: Queueing, room: dict[str, Any]) -> None:
    """Of tokens, the second request fills a step."""
    pushing = await queue.pusher()
    scripts = [blocked() for _ in range(5)]
    one = await queue.puller(1, **room)
    one.llm.scripts.extend(script for script, _ in scripts)
    asked = [asyncio.create_task(collect(pushing.generate, request(2))) for _ in range(5)]

    await until(lambda: len(one.llm.results) == 2)
    await depth_is(queue, 3)
    assert len(one.llm.results) == 2
    scripts[0][1].release()
    await until(lambda: len(one.llm.results) == 3)
    await depth_is(queue, 2)

    for _, gate in scripts:
        gate.release()
    for answer in asked:
        assert tokens_of(await answer) == expected_tokens(2)


async def test_depth_and_age_are_those_of_what_waits(queue: Queueing) -> None:
    pushing, watching = await queue.pusher(), await queue.pusher()
    assert (pushing.watch.depth(), pushing.watch.age()) == (0, 0.0)
    asked = [asyncio.create_task(collect(pushing.generate, request(2))) for _ in range(3)]

    await until(lambda: len(pushing.client.waiting_ages()) == 3)
    assert pushing.watch.depth() == 3, "its own it knows at once"
    await until(lambda: watching.watch.depth() == 3)
    await until(lambda: watching.watch.age() > 0.1)
    assert watching.watch.age() < 5

    await queue.puller()
    await asyncio.gather(*asked)
    await until(lambda: (watching.watch.depth(), watching.watch.age()) == (0, 0.0))


async def test_age_is_not_that_of_an_item_that_has_left(queue: Queueing) -> None:
    """No worker takes any, so that the place at which the next one will begin stays as it is."""
    pushing, watching = await queue.pusher(timeout=60.0), await queue.pusher()
    first = asyncio.create_task(collect(pushing.generate, request(2)))
    await until(lambda: watching.watch.age() > 1.0)
    began = time.monotonic()
    second = asyncio.create_task(collect(pushing.generate, request(2)))
    await until(lambda: watching.watch.depth() == 2)
    first.cancel()
    await until(lambda: watching.watch.age() <= time.monotonic() - began)
    assert watching.watch.depth() == 1
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await depth_is(queue, 0)


async def test_a_client_that_leaves_while_it_waits_costs_no_prefill(queue: Queueing) -> None:
    pushing = await queue.pusher()
    context = FakeContext()
    leaving = asyncio.create_task(collect(pushing.generate, request(4), context))
    staying = asyncio.create_task(collect(pushing.generate, request(4)))
    await depth_is(queue, 2)

    context.stop()
    with pytest.raises(RequestCancelledError):
        await leaving
    await depth_is(queue, 1)

    pulling = await queue.puller()
    assert tokens_of(await staying) == expected_tokens(4)
    assert len(pulling.llm.results) == 1


async def test_an_item_of_a_pusher_that_is_gone_is_skipped(queue: Queueing) -> None:
    gone, pushing = await queue.pusher(), await queue.pusher()
    lost = asyncio.create_task(collect(gone.generate, request(4)))
    await until(lambda: pushing.watch.depth() == 1)
    # Not by way of its own end: that would take the item out of the queue.
    await gone.broker.close()
    lost.cancel()

    pulling = await queue.puller()
    assert tokens_of(await collect(pushing.generate, request(4))) == expected_tokens(4)
    assert len(pulling.llm.results) == 1
    await until(lambda: pushing.watch.depth() == 0)


async def test_a_client_that_leaves_during_the_prefill_stops_it(queue: Queueing) -> None:
    pushing, pulling = await queue.pusher(), await queue.puller()
    context = FakeContext()
    asked, gate = await begun(pulling, collect(pushing.generate, request(4), context))

    context.stop()
    with pytest.raises(RequestCancelledError):
        await asked
    await until(lambda: pulling.llm.results[0].is_aborted)
    gate.release()
    # Its room is free again.
    assert tokens_of(await collect(pushing.generate, request(4))) == expected_tokens(4)


async def test_a_handoff_that_is_not_taken_is_released(queue: Queueing) -> None:
    """The pusher dies while the prefill runs: its answer finds no receiver."""
    pushing, pulling = await queue.pusher(), await queue.puller()
    asked, gate = await begun(pulling, collect(pushing.generate, request(4)))
    await pushing.broker.close()

    gate.release()
    await until(lambda: pulling.llm.results[0].finished)
    await until(lambda: len(LLM.kv_store) == 0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_item_beyond_queue_timeout_fails_and_leaves_the_queue(queue: Queueing) -> None:
    pushing = await queue.pusher(timeout=1.5)
    with pytest.raises(StageTimeoutError, match=r"within 1\.5 s \(--queue-timeout\)") as raised:
        await collect(pushing.generate, asked := request(4))
    assert raised.value.peer == 0
    assert "prefill_instance" not in asked.trace.facts, "none has taken it"
    await depth_is(queue, 0)
    pulling = await queue.puller()
    assert tokens_of(await collect(pushing.generate, request(4))) == expected_tokens(4)
    assert len(pulling.llm.results) == 1


async def test_leaving_worker_finishes_its_items_and_leaves_the_others(queue: Queueing) -> None:
    pushing = await queue.pusher()
    leaving = await queue.puller(1, max_items=1)
    script, gate = blocked()
    leaving.llm.scripts.append(script)
    asked = [asyncio.create_task(collect(pushing.generate, request(4))) for _ in range(3)]
    await until(lambda: leaving.llm.results)

    stopping = asyncio.create_task(leaving.leave())
    await asyncio.sleep(0)
    gate.release()
    await stopping
    assert len(leaving.llm.results) == 1
    await depth_is(queue, 2)

    staying = await queue.puller(2)
    for answer in asked:
        assert tokens_of(await answer) == expected_tokens(4)
    assert len(staying.llm.results) == 2


# -- not for a prefill worker where there is none to answer


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
def watchful(queue: Queueing) -> Queueing:
    """Looks often, and takes a worker for lost after 0.3 s."""
    queue.limits = QueueLimits(look=0.01, beat=0.1)
    return queue


async def prefilled(pushing: Pushing) -> list[dict[str, Any]]:
    item = await pushing.client.pick(request())
    return [answer async for answer in item.call(encode_request(request(), PREFILL), None)]


async def requiring(watchful: Queueing, workers: Workers) -> Pushing:
    pushing = await watchful.pusher()
    pushing.client.require(workers)
    return pushing


async def test_prefill_queue_without_workers_raises_no_instance(watchful: Queueing) -> None:
    pushing = await requiring(watchful, Workers())
    with pytest.raises(NoInstanceError, match="no prefill worker is in discovery"):
        await pushing.client.pick(request())


async def test_a_request_in_the_queue_ends_when_the_last_prefill_worker_leaves(watchful: Queueing) -> None:
    workers = Workers(1)
    pushing = await requiring(watchful, workers)
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


async def test_a_request_whose_prefill_worker_was_killed_ends_when_no_other_is_there(
    watchful: Queueing,
) -> None:
    workers = Workers(1)
    pushing, dying = await requiring(watchful, workers), await watchful.puller(1)
    waiting, _ = await begun(dying, prefilled(pushing))

    await dying.die()
    workers.ids.clear()

    async with asyncio.timeout(5):
        with pytest.raises(NoInstanceError, match="no prefill worker is in discovery") as raised:
            await waiting
    assert raised.value.peer == QUEUE_ID


async def test_a_request_that_a_leaving_prefill_worker_has_taken_is_answered(watchful: Queueing) -> None:
    workers = Workers(1)
    pushing, leaving = await requiring(watchful, workers), await watchful.puller(1)
    waiting, gate = await begun(leaving, prefilled(pushing))
    stopping = asyncio.create_task(leaving.leave())
    workers.ids.clear()
    await asyncio.sleep(2 * watchful.limits.silence)  # that nothing happens has no event

    gate.release()

    assert len(await waiting) == 1
    await stopping
    LLM.kv_store.clear()  # no decode takes it
