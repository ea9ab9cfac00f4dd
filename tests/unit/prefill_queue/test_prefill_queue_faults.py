"""The prefill queue when a worker dies, when NATS does, and when a message is forged."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import nats
import pytest

from tests.support.handling import collect, expected_tokens, raw_request, request, tokens_of, until
from tests.support.nats_server import nats_server
from tests.support.queueing import Pushing, Queueing, begun, blocked, queueing, raising
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.errors import EngineError, InvalidRequestError, PeerUnavailableError, QueueUnusableError
from trtllm_disagg.handlers.circuit_breaker import QUEUE_ID, CircuitBreaker, StreamTimeouts
from trtllm_disagg.handlers.peers import PREFILL, Peers
from trtllm_disagg.prefill_queue.broker import QueueLimits
from trtllm_disagg.prefill_queue.messages import MAX_BYTES, Item, UnreadableError, decode, encode
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import encode_request

ACK_SECONDS = 0.6


@pytest.fixture
def queue(queue: Queueing) -> Queueing:
    """A dead worker is noticed five times as fast as in service."""
    queue.limits = QueueLimits(ack=ACK_SECONDS, beat=ACK_SECONDS / 3)
    return queue


async def test_a_dead_workers_item_goes_to_another_one(queue: Queueing) -> None:
    pushing, dying = await queue.pusher(), await queue.puller(1)
    asked = request(5)
    answer, _ = await begun(dying, collect(pushing.generate, asked))

    await dying.die()
    living = await queue.puller(2)

    assert tokens_of(await answer) == expected_tokens(5)
    assert len(living.llm.results) == 1
    assert asked.trace.facts["prefill_instance"] == "2"


async def test_a_worker_that_fails_its_items_is_skipped_and_not_the_queue(queue: Queueing) -> None:
    pushing, _ = await queue.pusher(), await queue.puller(0xC, serve=raising(EngineError("broken")))
    stage, breaker = guarded(pushing, 3)
    for _ in range(3):
        instance = await stage.pick(request())
        with pytest.raises(EngineError, match="broken") as error, instance:
            await anext(instance.answers(encode_request(request(), PREFILL), None))
        assert error.value.peer == instance.instance_id == 0xC
    assert breaker.open() == {0xC}

    await queue.puller(0xD)
    instance = await stage.pick(request())
    assert len([each async for each in instance.answers(encode_request(request(1), PREFILL), None)]) == 1
    assert instance.instance_id == 0xD
    assert breaker.open() == {0xC}


def guarded(pushing: Pushing, failures: int) -> tuple[Peers, CircuitBreaker]:
    breaker = CircuitBreaker(failures, 60.0)
    return Peers(pushing.client, breaker, {"prefill": StreamTimeouts(20.0, 20.0)}), breaker


async def test_a_skipped_worker_without_another_one_runs_the_item_and_is_skipped_no_more(
    queue: Queueing,
) -> None:
    queue.limits = QueueLimits(offers=3)
    pushing, _ = await queue.pusher(), await queue.puller(0xC)
    stage, breaker = guarded(pushing, 3)
    for _ in range(3):
        breaker.failed(0xC)
    instance = await stage.pick(request())
    assert len([each async for each in instance.answers(encode_request(request(1), PREFILL), None)]) == 1
    assert breaker.open() == set()


async def test_a_worker_that_refuses_an_item_that_avoids_it_has_not_failed(queue: Queueing) -> None:
    queue.limits = QueueLimits(offers=3)
    pushing, _ = await queue.pusher(), await queue.puller(0xC)
    stage, breaker = guarded(pushing, 1)
    instance = await stage.pick(request().avoiding(0xC))
    with (
        pytest.raises(PeerUnavailableError, match="no other prefill worker takes this request") as error,
        instance,
    ):
        await anext(instance.answers(encode_request(request(), PREFILL), None))
    assert error.value.peer == QUEUE_ID
    assert breaker.open() == set()


async def test_a_worker_slower_than_the_ack_wait_keeps_its_item(queue: Queueing) -> None:
    # Several beats in each wait, also on a machine that is busy for half a second.
    queue.limits = QueueLimits(ack=3 * ACK_SECONDS, beat=ACK_SECONDS / 3)
    pushing, slow, other = await queue.pusher(timeout=1.0), await queue.puller(1), await queue.puller(2)
    scripts = [blocked() for _ in range(2)]
    for puller, (script, _) in zip((slow, other), scripts, strict=True):
        puller.llm.scripts.append(script)
    answer = asyncio.create_task(collect(pushing.generate, request(5)))

    # Longer than the ack wait, and than the queue timeout.
    await asyncio.sleep(5 * ACK_SECONDS)
    for _, gate in scripts:
        gate.release()

    assert tokens_of(await answer) == expected_tokens(5)
    assert len(slow.llm.results) + len(other.llm.results) == 1


async def test_late_answer_of_a_replaced_worker_is_released(queue: Queueing) -> None:
    queue.limits = QueueLimits(ack=ACK_SECONDS, beat=1000.0)
    pushing, slow = await queue.pusher(), await queue.puller(1)
    answer, gate = await begun(slow, collect(pushing.generate, request(5)))
    # It is not heard of; a second worker comes and does it all.
    await queue.puller(2)
    assert tokens_of(await answer) == expected_tokens(5)

    gate.release()
    await until(lambda: slow.llm.results[0].finished)
    await until(lambda: len(LLM.kv_store) == 0)


async def test_item_lost_by_three_workers_fails_and_is_not_offered_again(queue: Queueing) -> None:
    pushing = await queue.pusher()
    answer = asyncio.create_task(collect(pushing.generate, request(5)))
    for instance_id in range(queue.limits.claims):
        dying = await queue.puller(instance_id)
        dying.llm.scripts.append(blocked()[0])
        await until(lambda dying=dying: dying.llm.results)  # type: ignore[misc]
        await dying.die()
    spared = await queue.puller(99)
    with pytest.raises(PeerUnavailableError, match="3 prefill workers have lost this request"):
        await answer
    assert spared.llm.results == []


async def test_without_nats_requests_fail_at_once_and_go_on_when_it_is_back(queue: Queueing) -> None:
    pushing, pulling = await queue.pusher(), await queue.puller(1, max_items=1)
    running, gate = await begun(pulling, collect(pushing.generate, request(5)))
    await pushing.broker.push(item())
    await until(lambda: pushing.watch.depth() == 1)
    try:
        await asyncio.to_thread(queue.server.kill)
        # Long before the queue timeout.
        async with asyncio.timeout(10):
            with pytest.raises(PeerUnavailableError, match="NATS is gone") as raised:
                await running
            assert raised.value.peer == 0, "the worker is not to blame"
            with pytest.raises(PeerUnavailableError, match="NATS is gone"):
                await collect(pushing.generate, request(5))
        assert pushing.watch.depth() == 0
        gate.release()
        await until(lambda: pulling.llm.results[0].finished)
    finally:
        await asyncio.to_thread(queue.server.start)

    async with asyncio.timeout(30):
        await pushing.broker.wait_until_usable()
        assert tokens_of(await collect(pushing.generate, request(5))) == expected_tokens(5)
    await until(lambda: len(LLM.kv_store) == 0)


async def test_stream_is_recreated_on_a_server_that_lost_it(tmp_path: Any, no_leaks: None) -> None:
    with nats_server(tmp_path / "first") as server:
        async with queueing(server) as queue:
            pushing = await queue.pusher()
            await queue.puller()
            await asyncio.to_thread(server.kill)
            await until(lambda: not pushing.broker.is_usable)
            server.forget(tmp_path / "second")
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(30):
                await pushing.broker.wait_until_usable()
                assert tokens_of(await collect(pushing.generate, request(5))) == expected_tokens(5)


async def test_a_worker_can_leave_while_nats_is_gone(tmp_path: Any, no_leaks: None) -> None:
    with nats_server(tmp_path) as server:
        async with queueing(server) as queue:
            pulling = await queue.puller()
            await asyncio.to_thread(server.kill)
            await until(lambda: not pulling.broker.is_usable)
            async with asyncio.timeout(20):
                await pulling.leave()


def item(**changes: Any) -> bytes:
    good: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "pusher": uuid.uuid4().hex,
        "request_id": "r",
        "avoid": [],
        "request": encode_request(request(), PREFILL),
    }
    return msgspec.msgpack.encode(good | changes)


FORGED = {
    "nothing": b"",
    "garbage": b"\xc1\xff\x00garbage",
    "cut": item()[:-5],
    "json": b'{"id": 1}',
    "a list": msgspec.msgpack.encode([1, 2]),
    "an id that is a subject": item(id="$JS.API.STREAM.DELETE.x"),
    "a pusher that is a wildcard": item(pusher="*"),
    "a pusher with a line end": item(pusher=uuid.uuid4().hex + "\n"),
    "a request that is none": item(request=[1]),
    "a number for a name": item(request_id=7),
    "an endless list": item(avoid=list(range(65))),
    "another endless list": item(skipped=list(range(65))),
    "too deep": b"\x91" * 100_000,
    "unknown": item(),
    "without tokens": item(request={"no": "tokens"}),
}


async def test_forged_items_are_dropped_and_harm_no_request(queue: Queueing) -> None:
    pushing, pulling = await queue.pusher(), await queue.puller()
    for data in FORGED.values():
        await pushing.broker.push(data)

    assert tokens_of(await collect(pushing.generate, request(5))) == expected_tokens(5)
    await until(lambda: pushing.watch.depth() == 0)
    assert len(pulling.llm.results) == 1
    assert await num_in_stream(queue) == 0, "none of them comes again"


async def num_in_stream(queue: Queueing) -> int:
    client = await nats.connect(queue.server.url)
    try:
        async with asyncio.timeout(20):
            while True:
                state = (await client.jetstream().stream_info(queue.names.stream)).state
                if not state.messages:
                    return 0
                await asyncio.sleep(0.02)
    finally:
        await client.close()


async def test_invalid_item_request_is_refused_by_name(queue: Queueing) -> None:
    pushing, pulling = await queue.pusher(), await queue.puller()
    instance = await pushing.client.pick(request())
    for broken, message in (
        ({"token_ids": "abc"}, "token_ids"),
        ({"errand": {"stage": "decode"}}, "takes prefill requests only"),
        ({"errand": None}, "takes prefill requests only"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            await anext(instance.call(encode_request(request(), PREFILL) | broken, None))
    assert pulling.llm.results == []


async def test_an_answer_too_large_for_nats_fails_at_once_and_is_not_the_workers_fault(
    queue: Queueing,
) -> None:
    """As with echo and logprobs: prefill's answer has those of the whole prompt."""
    ended: list[bool] = []

    async def serve(asked: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk([5], engine_data={"prompt_logprobs": "x" * (2 << 20)})
        ended.append(context.is_stopped())

    pushing = await queue.pusher(timeout=60.0)
    await queue.puller(0xC, serve=serve)
    instance = await pushing.client.pick(request())
    with pytest.raises(QueueUnusableError, match=r"does not fit the prefill queue: NATS takes \d+") as caught:
        await anext(instance.call(encode_request(request(), PREFILL), None))
    assert caught.value.peer == QUEUE_ID
    await until(lambda: ended == [True])


async def test_forged_messages_to_a_pusher_harm_no_request(queue: Queueing) -> None:
    pushing, pulling = await queue.pusher(), await queue.puller()
    answer, gate = await begun(pulling, collect(pushing.generate, request(5)))
    for forged in (b"", b"\x00", b"\x91" * 100_000, b"x" * 1000):
        await pulling.broker.send(pushing.client.subject, forged)
    gate.release()
    assert tokens_of(await answer) == expected_tokens(5)


def test_an_item_reads_as_it_was_written() -> None:
    sent = Item(uuid.uuid4().hex, uuid.uuid4().hex, None, [1, 2**64 - 1], raw_request(), [2])
    assert decode(encode(sent), Item) == sent
    assert decode(item(), Item).skipped == [], "an older pusher does not say which workers it skips"
    with pytest.raises(UnreadableError):
        decode(encode(msgspec.structs.replace(sent, request_id="a\n2026-11-27 forged line")), Item)
    with pytest.raises(UnreadableError, match="bytes, of which"):
        decode(b"x" * (MAX_BYTES + 1), Item)
