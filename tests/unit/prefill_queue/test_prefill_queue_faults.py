"""The prefill queue when a worker freezes, when NATS fails or loses tickets, and when a message is forged."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from tests.support.handling import collect, expected_tokens, request, tokens_of, until
from tests.support.nats_server import nats_server
from tests.support.queueing import Asker, Queueing, begun, closing, queueing
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import NoInstanceError
from trtllm_disagg.prefill_queue.asking import _Waiting
from trtllm_disagg.prefill_queue.broker import Broker, QueueLimits
from trtllm_disagg.prefill_queue.tickets import (
    CONSUMER,
    MAX_BYTES,
    Answer,
    Offer,
    Ticket,
    UnreadableError,
    decode,
    encode,
)
from trtllm_disagg.worker.pairing import Fingerprint, ModelIdentity, describe_worker, group_of

ID = uuid.uuid4().hex


# -- workers


async def taken(broker: Broker) -> Msg:
    message = await broker.pull(5.0)
    assert message is not None
    return message


async def test_a_ticket_that_a_frozen_worker_has_taken_goes_to_another_one(queue: Queueing) -> None:
    queue.limits = QueueLimits(ack=0.5)
    asker, frozen = await queue.asker(), await queue.connect()
    answer = asyncio.create_task(collect(asker.generate, request(5)))
    await taken(frozen)
    assert asker.asking.depth() == 1, "it still waits"

    taker = await queue.taker()
    assert tokens_of(await answer) == expected_tokens(5)
    assert len(taker.llm.results) == 1
    await frozen.close()


async def test_a_frozen_workers_late_offer_is_refused(queue: Queueing) -> None:
    """Its room is free again, and the request is not sent twice."""
    queue.limits = QueueLimits(ack=0.5)
    asker, frozen = await queue.asker(), await queue.connect()
    asked = asyncio.create_task(collect(asker.generate, request(5)))
    ticket: Ticket = decode((await taken(frozen)).data, Ticket)
    taker = await queue.taker()
    await asked

    offer = encode(Offer(ticket.id, 0xA))
    assert await frozen.ask(queue.names.asker(ticket.asker), offer) is Answer.OVER
    assert len(taker.client.calls) == 1
    await frozen.close()


OFFERS = st.lists(st.integers(0, 3), max_size=8)


async def answers_to(offers: list[int], takers: set[int], leaves_after: int) -> None:
    waiting = _Waiting(lambda: takers)
    answers = []
    for place, worker in enumerate(offers):
        if place == leaves_after:
            waiting.fail(NoInstanceError("it left"))
        answers.append(waiting.answer(worker))
    possible = [place for place, worker in enumerate(offers) if worker in takers and place < leaves_after]
    accepted = [place for place, answer in enumerate(answers) if answer is Answer.ACCEPTED]
    assert accepted == possible[:1], "the first one that may take it, and no other"
    end = min([*accepted, leaves_after])
    assert set(answers[:end]) <= {Answer.REFUSED}
    assert set(answers[end + 1 :]) <= {Answer.OVER}
    assert waiting.close() is bool(accepted)


@given(offers=OFFERS, takers=st.sets(st.integers(0, 3)), leaves_after=st.integers(0, 9))
def test_a_request_accepts_one_offer_and_every_offer_gets_an_answer(
    offers: list[int], takers: set[int], leaves_after: int
) -> None:
    asyncio.run(answers_to(offers, takers, leaves_after))


# -- NATS


@asynccontextmanager
async def administrator(queue: Queueing) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(queue.server.url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


@pytest.mark.parametrize("lost", ["stream", "tickets"])
async def test_requests_whose_tickets_nats_has_lost_go_on_without_the_queue(
    queue: Queueing, lost: str
) -> None:
    asker, watching = await queue.asker(), await queue.asker()
    await queue.taker(max_prefills=0)
    waiting = asyncio.create_task(collect(asker.generate, asked := request(5)))
    await until(lambda: watching.asking.depth() == 1)

    async with administrator(queue) as admin:
        if lost == "stream":
            await admin.delete_stream(queue.names.stream)
        else:
            await admin.purge_stream(queue.names.stream)

    # Sooner than the queue timeout.
    async with asyncio.timeout(15):
        assert tokens_of(await waiting) == expected_tokens(5)
    assert asked.trace.fallbacks == [
        "direct: the prefill queue has lost the request: NATS has no ticket of it"
    ]
    await until(lambda: watching.asking.depth() == 0)


@pytest.mark.parametrize("deleted", ["stream", "consumer"])
async def test_a_stream_or_consumer_that_was_deleted_is_made_anew(queue: Queueing, deleted: str) -> None:
    asker, taker = await queue.asker(), await queue.taker()
    async with administrator(queue) as admin:
        if deleted == "stream":
            await admin.delete_stream(queue.names.stream)
        else:
            await admin.delete_consumer(queue.names.stream, CONSUMER)
    assert await is_used_again(asker)
    assert taker.llm.results


async def is_used_again(asker: Asker) -> bool:
    async with asyncio.timeout(30):
        while True:
            asked = request(5)
            assert tokens_of(await collect(asker.generate, asked)) == expected_tokens(5)
            if not asked.trace.fallbacks:
                return True


async def test_a_frozen_server_costs_the_direct_call(queue: Queueing) -> None:
    queue.limits = QueueLimits(reply=0.3)
    asker, taker = await queue.asker(), await queue.taker(1, max_prefills=1)
    running, gate = await begun(taker, collect(asker.generate, request(5)))
    waiting = asyncio.create_task(collect(asker.generate, request(5)))
    await until(lambda: asker.asking.depth() == 1)
    with queue.server.frozen():
        new = [asyncio.create_task(collect(asker.generate, request(5))) for _ in range(3)]
        gate.release()
        # Sooner than the queue timeout: the client misses two answers to its pings.
        async with asyncio.timeout(15):
            for answer in (running, waiting, *new):
                assert tokens_of(await answer) == expected_tokens(5)
    assert await is_used_again(asker)


async def test_a_server_that_lost_everything_gets_a_new_stream(tmp_path: Path, no_leaks: None) -> None:
    with nats_server(tmp_path / "first") as server:
        async with queueing(server) as queue:
            asker = await queue.asker()
            await queue.taker()
            await asyncio.to_thread(server.kill)
            await until(lambda: not asker.broker.is_usable)
            server.forget(tmp_path / "second")
            await asyncio.to_thread(server.start)
            assert await is_used_again(asker)


async def test_a_worker_can_leave_while_nats_is_gone(tmp_path: Path, no_leaks: None) -> None:
    with nats_server(tmp_path) as server:
        async with queueing(server) as queue:
            taker = await queue.taker()
            await asyncio.to_thread(server.kill)
            await until(lambda: not taker.broker.is_usable)
            async with asyncio.timeout(20):
                await taker.taking.leave()


async def test_nats_is_watched_on_after_an_unforeseen_error(
    queue: Queueing, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, other = await queue.asker(), await queue.asker()
    states = [other.broker.state]

    async def broken() -> Any:
        monkeypatch.setattr(other.broker, "state", states[0])
        raise KeyError("first_seq")

    monkeypatch.setattr(other.broker, "state", broken)
    waiting = asyncio.create_task(collect(asker.generate, request(5)))
    await until(lambda: other.asking.depth() == 1)
    assert "querying the prefill queue failed" in caplog.text
    await queue.taker()
    await waiting


# -- forged messages


def ticket(**changes: Any) -> bytes:
    return msgspec.msgpack.encode({"id": uuid.uuid4().hex, "asker": ID, "tokens": 3} | changes)


FORGED = {
    "nothing": b"",
    "garbage": b"\xc1\xff\x00garbage",
    "cut": ticket()[:-5],
    "json": b'{"id": 1}',
    "a list": msgspec.msgpack.encode([1, 2]),
    "an id that is a subject": ticket(id="$JS.API.STREAM.DELETE.x"),
    "an asker that is a wildcard": ticket(asker="*"),
    "an asker with a line end": ticket(asker=ID + "\n"),
    "a negative length": ticket(tokens=-1),
    "no length": ticket(tokens="many"),
    "too deep": b"\x91" * 1000,
    "unknown": ticket(),
    "endless": ticket(tokens=2**63 - 1),
}


async def test_forged_tickets_and_offers_are_dropped_and_harm_no_request(queue: Queueing) -> None:
    asker, taker = await queue.asker(), await queue.taker()
    answer, gate = await begun(taker, collect(asker.generate, request(5)))
    for data in FORGED.values():
        await asker.broker.push(data)
    probe = await queue.connect()
    for data in (b"", b"\x00", b"\x91" * 1000, encode(Offer(ID, 0xA))):
        await probe.send(queue.names.asker(ID), data)
    gate.release()

    assert tokens_of(await answer) == expected_tokens(5)
    assert tokens_of(await collect(asker.generate, request(5))) == expected_tokens(5)
    async with asyncio.timeout(20):
        while (await probe.state()).messages:
            pass
    assert len(taker.llm.results) == 2
    await probe.close()


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_unreadable(data: bytes) -> None:
    for kind in (Ticket, Offer):
        try:
            read = decode(data, kind)
        except UnreadableError:
            continue
        assert decode(encode(read), kind) == read


def test_a_message_reads_as_it_was_written_within_its_bounds() -> None:
    for sent in (Ticket(ID, ID, 7), Offer(ID, 2**64 - 1)):
        assert decode(encode(sent), type(sent)) == sent
        assert len(encode(sent)) < MAX_BYTES
    with pytest.raises(UnreadableError, match="bytes; at most"):
        decode(b"x" * (MAX_BYTES + 1), Ticket)


# -- deployments on one server


def described(**changes: Any) -> dict[str, Any]:
    config = WorkerConfig(model="m", role=changes.pop("role", Role.PREFILL), **changes.pop("config", {}))
    identity = ModelIdentity(config.model_name, "a/directory", changes.pop("weights", "abc"))
    args, block_size = changes.pop("engine_args", {"dtype": "float32"}), changes.pop("block_size", 16)
    return describe_worker(config, Fingerprint.of(config.engine, args, block_size, **changes), identity)


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"weights": "other"}, False),
        ({"block_size": 32}, False),
        ({"engine_args": {"dtype": "bfloat16"}}, False),
        ({"config": {"served_model_name": "other"}}, False),
        ({"config": {"handoff_protocol": "two_phase"}}, False),
        # A switch changes the strategy, and the queue stays.
        ({"role": Role.DECODE}, True),
        ({"config": {"strategy": "prefill_first"}}, True),
    ],
)
def test_workers_that_could_not_serve_a_request_together_are_of_another_kind(
    change: dict[str, Any], is_same: bool
) -> None:
    assert (group_of(described(**change)) == group_of(described())) is is_same


async def test_deployments_of_another_kind_take_nothing_from_each_other(queue: Queueing) -> None:
    async with closing(Queueing(queue.server, namespace=queue.namespace, kind="other")) as others:
        stranger = await others.taker(0xBAD)
        asker = await queue.asker()
        waiting = asyncio.create_task(collect(asker.generate, asked := request(5)))
        await until(lambda: asker.asking.age() > 0.5)
        assert stranger.llm.results == []

        await queue.taker(0xA)
        assert tokens_of(await waiting) == expected_tokens(5)
        assert asked.trace.facts["prefill_instance"] == "a"
