"""What waits in the prefill queue: for room, in order, until its client leaves, or too long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from tests.support.handling import PROMPT, collect, expected_tokens, request, tokens_of, until
from tests.support.queueing import Queueing, begun, blocked
from tests.support.stage_client import FakeContext
from trtllm_disagg.errors import RequestCancelledError, StageTimeoutError
from trtllm_disagg.prefill_queue.broker import QueueLimits
from trtllm_disagg.prefill_queue.taking import Room
from trtllm_disagg.prefill_queue.tickets import Ticket
from trtllm_disagg.types import GenerateRequest, TokenChunk


async def depth_is(queue: Queueing, depth: int) -> None:
    await until(lambda: all(asker.asking.depth() == depth for asker in queue.askers))


async def nothing_waits(queue: Queueing) -> None:
    asking = queue.askers[-1].asking
    await until(lambda: (asking.depth(), asking.age()) == (0, 0.0))


@pytest.mark.parametrize("room", [{"max_prefills": 2}, {"max_tokens": len(PROMPT) + 1}])
async def test_a_worker_never_has_more_than_it_has_room_for_and_takes_in_order(
    queue: Queueing, room: dict[str, Any]
) -> None:
    """Of tokens, the second request fills a step."""
    asker = await queue.asker()
    scripts = [blocked() for _ in range(5)]
    taker = await queue.taker(1, **room)
    taker.llm.scripts.extend(script for script, _ in scripts)
    contexts = [FakeContext(f"request-{number}") for number in range(5)]
    asked: list[asyncio.Task[Any]] = []
    for number, context in enumerate(contexts):
        asked.append(asyncio.create_task(collect(asker.generate, request(2), context)))
        await until(lambda number=number: len(taker.llm.results) + asker.asking.depth() > number)  # type: ignore[misc]

    await depth_is(queue, 3)
    assert len(taker.llm.results) == 2
    scripts[0][1].release()
    await until(lambda: len(taker.llm.results) == 3)
    await depth_is(queue, 2)

    for _, gate in scripts:
        gate.release()
    for answer in asked:
        assert tokens_of(await answer) == expected_tokens(2)
    assert [call.context.id() for call in taker.client.calls] == [context.id() for context in contexts]


async def test_direct_calls_count_as_used_room(queue: Queueing) -> None:
    asker, taker = await queue.asker(), await queue.taker(1, max_prefills=1)
    direct, gate = await begun(taker, collect(asker.generate, request(2, annotations=["disagg:next=1"])))
    waiting = asyncio.create_task(collect(asker.generate, request(2)))
    await depth_is(queue, 1)
    await asyncio.sleep(0.1)  # that nothing happens has no event
    assert len(taker.llm.results) == 1

    gate.release()
    for answer in (direct, waiting):
        assert tokens_of(await answer) == expected_tokens(2)


async def test_room_is_kept_for_an_expected_call_until_it_comes_or_is_late() -> None:
    room, long, short = Room(max_prefills=2, max_tokens=100), Ticket("a", "b", 5000), Ticket("c", "b", 1)
    room.expect(long)
    waiting = asyncio.create_task(room.until(lambda: room.is_there))
    await asyncio.sleep(0)
    assert not waiting.done()
    await room.called(long, seconds=0.01)
    room.forget(long)
    await waiting

    room.expect(short)
    coming = asyncio.create_task(room.called(short, seconds=60.0))
    with room.prefilling(short.tokens):
        await coming
        counted_once = room.is_there
        with room.prefilling(1):
            counted_both = not room.is_there
    assert (counted_once, counted_both, room.is_there) == (True, True, True)


async def test_depth_and_age_are_those_of_what_waits(queue: Queueing) -> None:
    asker, watching = await queue.asker(), await queue.asker()
    assert (asker.asking.depth(), asker.asking.age()) == (0, 0.0)
    asked = [asyncio.create_task(collect(asker.generate, request(2))) for _ in range(3)]

    await until(lambda: asker.asking.depth() == 3)
    await until(lambda: watching.asking.depth() == 3)
    await until(lambda: watching.asking.age() > 0.1)
    assert watching.asking.age() < 5

    await queue.taker()
    await asyncio.gather(*asked)
    await nothing_waits(queue)


async def test_a_client_that_leaves_while_it_waits_costs_no_prefill(queue: Queueing) -> None:
    asker = await queue.asker()
    await queue.asker()
    context = FakeContext()
    leaving = asyncio.create_task(collect(asker.generate, request(4), context))
    await depth_is(queue, 1)
    staying = asyncio.create_task(collect(asker.generate, request(4)))
    await depth_is(queue, 2)

    context.stop()
    with pytest.raises(RequestCancelledError):
        await leaving
    await depth_is(queue, 1)

    taker = await queue.taker()
    assert tokens_of(await staying) == expected_tokens(4)
    assert len(taker.llm.results) == 1


async def test_a_ticket_of_an_asker_that_is_gone_is_dropped(queue: Queueing) -> None:
    gone, asker = await queue.asker(), await queue.asker()
    lost = asyncio.create_task(collect(gone.generate, request(4)))
    await until(lambda: asker.asking.depth() == 1)
    # Not by way of its own end: that would withdraw the ticket.
    await gone.broker.close()
    lost.cancel()

    taker = await queue.taker(max_prefills=1)
    assert tokens_of(await collect(asker.generate, request(4))) == expected_tokens(4)
    assert len(taker.llm.results) == 1
    await nothing_waits(queue)


async def test_a_client_that_leaves_during_the_prefill_stops_it(queue: Queueing) -> None:
    asker, taker = await queue.asker(), await queue.taker(max_prefills=1)
    context = FakeContext()
    asked, gate = await begun(taker, collect(asker.generate, request(4), context))

    context.stop()
    with pytest.raises(RequestCancelledError):
        await asked
    await until(lambda: taker.llm.results[0].is_aborted)
    gate.release()
    # Its room is free again.
    assert tokens_of(await collect(asker.generate, request(4))) == expected_tokens(4)


async def test_a_request_beyond_queue_timeout_fails_and_its_ticket_is_withdrawn(queue: Queueing) -> None:
    asker = await queue.asker(timeout=1.0)
    with pytest.raises(StageTimeoutError, match=r"within 1 s \(--queue-timeout\)") as raised:
        await collect(asker.generate, asked := request(4))
    assert raised.value.peer is None
    assert "prefill_instance" not in asked.trace.facts
    await nothing_waits(queue)
    taker = await queue.taker()
    assert tokens_of(await collect(asker.generate, request(4))) == expected_tokens(4)
    assert len(taker.llm.results) == 1


async def test_a_worker_that_leaves_finishes_its_prefills_and_takes_no_more(queue: Queueing) -> None:
    asker, leaving = await queue.asker(), await queue.taker(1, max_prefills=1)
    first, gate = await begun(leaving, collect(asker.generate, request(4)))
    others = [asyncio.create_task(collect(asker.generate, request(4))) for _ in range(2)]
    await depth_is(queue, 2)

    async with asyncio.timeout(10):
        await leaving.taking.leave()
    gate.release()
    assert tokens_of(await first) == expected_tokens(4)
    await depth_is(queue, 2)

    staying = await queue.taker(2)
    for answer in others:
        assert tokens_of(await answer) == expected_tokens(4)
    assert (len(leaving.llm.results), len(staying.llm.results)) == (1, 2)


async def test_a_worker_does_not_leave_before_the_calls_that_it_expects(queue: Queueing) -> None:
    queue.limits = QueueLimits(call=60.0)
    asker, taker = await queue.asker(), await queue.taker(1)
    slow = asyncio.Event()
    call = taker.client.call

    async def late(body: Any, context: Any) -> Any:
        await slow.wait()
        async for answer in call(body, context):
            yield answer

    taker.client.call = late  # type: ignore[method-assign, assignment]
    asked = asyncio.create_task(collect(asker.generate, trace := request(4)))
    await until(lambda: "prefill_queue_ms" in trace.trace.facts)
    leaving = asyncio.create_task(taker.taking.leave())
    await asyncio.sleep(0.1)
    assert not leaving.done()

    slow.set()
    await leaving
    assert tokens_of(await asked) == expected_tokens(4)


# -- where there is no prefill worker


@pytest.fixture
def watchful(queue: Queueing) -> Queueing:
    queue.limits = QueueLimits(look=0.01)
    return queue


async def is_answered_alone(answer: Awaitable[list[TokenChunk]], asked: GenerateRequest) -> None:
    async with asyncio.timeout(5):
        assert tokens_of(await answer) == expected_tokens(5)
    (fallback,) = asked.trace.fallbacks
    assert fallback.startswith("local: no prefill worker")


async def test_without_prefill_workers_a_request_is_answered_alone_at_once(watchful: Queueing) -> None:
    asker, asked = await watchful.asker(may_answer_alone=True), request()
    await is_answered_alone(collect(asker.generate, asked), asked)


async def test_a_waiting_request_ends_when_the_last_prefill_worker_leaves_discovery(
    watchful: Queueing,
) -> None:
    asker, asked = await watchful.asker(may_answer_alone=True), request()
    await watchful.taker(max_prefills=0)
    waiting = asyncio.create_task(collect(asker.generate, asked))
    await depth_is(watchful, 1)
    await asyncio.sleep(0.1)
    assert not waiting.done()

    watchful.workers.by_id.clear()

    await is_answered_alone(waiting, asked)
    await nothing_waits(watchful)
