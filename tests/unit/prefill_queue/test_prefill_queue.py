"""Requests through the prefill queue over a real NATS server: a worker that has room gets the call, and what keeps a
request from the queue sends it to a prefill worker directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import PubAck

from tests.support.handling import ORDERS, collect, expected_tokens, request, tokens_of, until
from tests.support.nats_server import NatsServer, nats_server
from tests.support.queueing import Asker, Queueing, begun, queueing
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import FakeContext, RecordingStageClient
from tests.support.tracing import Batches, tracer_into
from tests.unit.handlers.test_images_in_orders import about, answer_of_agg
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.llm import LLM, Script
from trtllm_disagg.errors import EngineError, NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.selection import NoStage
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.prefill_queue.broker import Broker, NatsClient, QueueLimits
from trtllm_disagg.types import GenerateRequest


@pytest.mark.parametrize("asked", [request(6), about("red", "blue")], ids=["text", "images"])
async def test_a_queued_prefill_and_a_local_decode_give_the_whole_answer(
    asked: GenerateRequest, queue: Queueing
) -> None:
    asker, taker = await queue.asker(), await queue.taker(0xBEEF)

    chunks = await collect(asker.generate, asked)

    assert tokens_of(chunks) == (await answer_of_agg(asked)).token_ids
    assert [result.request_type for result in taker.llm.results] == ["context_only"]
    assert [result.request_type for result in asker.llm.results] == ["generation_only"]
    assert asked.trace.facts["prefill_instance"] == "beef"
    assert asked.trace.facts["prefill_queue_ms"] >= 0
    assert asked.trace.fallbacks == []


async def test_the_time_in_the_queue_is_a_span_with_the_worker(queue: Queueing) -> None:
    asker, _ = await queue.asker(), await queue.taker(0x1A)
    got = Batches()
    root = tracer_into(got).begin("request", "r", None, None)
    await collect(asker.generate, request(2).within(root))
    root.end()
    assert got.named("queue_wait").attributes == {"instance": "1a"}
    assert got.named("queue_wait").parent_id == got.named("request").span_id


async def test_a_body_of_any_size_goes_to_the_worker_and_not_through_nats(queue: Queueing) -> None:
    asker, taker = await queue.asker(), await queue.taker()
    asked = request(5, padding="x" * (2 << 20))

    assert tokens_of(await collect(asker.generate, asked)) == expected_tokens(5)

    assert (asked.trace.fallbacks, len(taker.llm.results)) == ([], 1)


def decode_worker() -> RecordingStageClient:
    config = WorkerConfig(model="m", role=Role.DECODE, strategy="prefill_first")
    return RecordingStageClient(build_generate(config, recording_engine(), NoStage()))


async def test_in_prefill_first_any_prefill_worker_has_the_prefill_and_decode_gets_the_handoff(
    nats: NatsServer, no_leaks: None
) -> None:
    async with queueing(nats, "prefill_first") as queue:
        decode = decode_worker()
        asker, taker = await queue.asker(decode=decode), await queue.taker()

        chunks = await collect(asker.generate, request(6))

        assert tokens_of(chunks) == expected_tokens(6)
        assert (asker.llm.results, len(taker.llm.results), len(decode.calls)) == ([], 1, 1)
        await decode.idle()


async def test_in_prefill_first_a_worker_that_takes_its_own_ticket_prefills_without_a_call(
    nats: NatsServer, no_leaks: None
) -> None:
    """A call to itself would have a second request of the same id, which Dynamo fails."""
    async with queueing(nats, "prefill_first") as queue:
        decode = decode_worker()
        asker, itself = await queue.asker(decode=decode), await queue.taker(0xF)
        asked = request(6)

        assert tokens_of(await collect(asker.generate, asked)) == expected_tokens(6)

        assert (len(asker.llm.results), itself.client.calls) == (1, [])
        assert (asked.trace.facts["prefill_instance"], asked.trace.fallbacks) == ("f", [])
        await decode.idle()


async def test_the_first_choice_is_queued_and_the_others_go_to_the_worker_that_took_it(
    queue: Queueing,
) -> None:
    asker, one, other = await queue.asker(), await queue.taker(1), await queue.taker(2)

    choices = {"n": 3, "temperature": 0.9, "seed": 5}
    chunks = await collect(asker.generate, request(6, sampling_options=choices))

    for index in range(3):
        assert tokens_of([chunk for chunk in chunks if chunk.index == index]) == expected_tokens(6)
    assert [result.request_type for result in asker.llm.results] == ["generation_only"] * 3
    assert sorted(len(taker.llm.results) for taker in (one, other)) == [0, 3]


@pytest.mark.parametrize("strategy", ORDERS)
async def test_the_prefill_worker_is_told_that_decode_has_the_kv(nats: NatsServer, strategy: str) -> None:
    """Else it would keep what it needs for a recall until the lease ends."""
    async with queueing(nats, strategy) as queue:
        decode = decode_worker() if strategy == "prefill_first" else None
        asker, taker = await queue.asker(decode=decode), await queue.taker()

        assert tokens_of(await collect(asker.generate, request(6))) == expected_tokens(6)

        await until(lambda: [each["phase_request"]["phase"] for each in taker.client.notices] == ["fetched"])
        if decode is not None:
            await decode.idle()


async def test_in_prefill_first_a_handoff_without_a_decode_is_recalled_from_the_worker_that_has_it(
    nats: NatsServer, no_leaks: None
) -> None:
    """Else dead decode workers would fill the prefill workers' pools with what is never fetched."""
    async with queueing(nats, "prefill_first") as queue:
        left, gone = decode_worker(), RecordingStageClient(error=PeerUnavailableError("gone"))
        for decode in (left, gone):
            asker = await queue.asker(decode=decode)
            await queue.taker()
            answer = asker.generate(request(6), FakeContext())
            assert (await anext(answer)).token_ids == expected_tokens(1)
            assert len(LLM.kv_store) == 1
            if decode is left:
                await answer.aclose()
            else:
                with pytest.raises(PeerUnavailableError, match="gone"):
                    await anext(answer)
            await until(lambda: len(LLM.kv_store) == 0)
        assert left.requests == [], "it was not asked to drain"


async def test_an_error_of_the_worker_is_the_calls_error_and_counts_against_it(queue: Queueing) -> None:
    asker, taker = await queue.asker(), await queue.taker(0xC)
    for _ in range(3):
        taker.llm.scripts.append(Script(error=EngineError("broken")))
        with pytest.raises(EngineError, match="broken") as raised:
            await collect(asker.generate, request(4))
        assert raised.value.peer == 0xC
    assert asker.peers.breaker.open() == {0xC}

    assert tokens_of(await collect(asker.generate, request(4))) == expected_tokens(4)
    assert asker.peers.breaker.open() == set(), "without another worker it is used, and works again"


async def test_tickets_go_past_a_worker_that_is_skipped_or_has_failed_the_request(queue: Queueing) -> None:
    asker, refused, other = await queue.asker(), await queue.taker(1, max_prefills=1), await queue.taker(2)
    for _ in range(3):
        asker.peers.breaker.failed(1)
    for asked in [*(request(3) for _ in range(4)), *(request(3).avoiding(1) for _ in range(4))]:
        assert tokens_of(await collect(asker.generate, asked)) == expected_tokens(3)
        assert asked.trace.facts["prefill_instance"] == "2"
    assert (len(refused.llm.results), len(other.llm.results)) == (0, 8)
    await until(lambda: refused.room.is_there)

    with pytest.raises(NoInstanceError, match="no prefill worker in discovery can take this request"):
        await collect(asker.generate, request(3).avoiding(1).avoiding(2))


async def test_a_worker_that_is_not_in_discovery_gets_no_request(queue: Queueing) -> None:
    asker, hidden, _ = await queue.asker(), await queue.taker(1, is_listed=False), await queue.taker(2)
    for _ in range(4):
        await collect(asker.generate, request(3))
    assert hidden.llm.results == []


async def test_a_worker_that_dies_with_the_call_fails_it_and_the_next_try_goes_to_another_one(
    queue: Queueing,
) -> None:
    queue.max_tries = 2
    asker, dying, living = await queue.asker(), await queue.taker(1), await queue.taker(2)
    dying.client.fails_with(PeerUnavailableError("connection reset"))
    num_asked = 0
    while not dying.client.calls:
        asked = request(5)
        assert tokens_of(await collect(asker.generate, asked)) == expected_tokens(5)
        num_asked += 1

    assert (len(living.llm.results), asked.trace.facts["prefill_instance"]) == (num_asked, "2")
    assert asked.trace.fallbacks == ["other_instance: connection reset"]


# -- without the queue


@pytest.mark.parametrize(
    "pin", [{"annotations": ["disagg:next=a"]}, {"routing": {"prefill_worker_id": 0xA}}], ids=str
)
async def test_a_request_with_a_pinned_prefill_worker_passes_the_queue_by(
    queue: Queueing, pin: dict[str, Any]
) -> None:
    asker, _ = await queue.asker(), await queue.taker()
    await queue.taker(0xB)
    asked = request(5, **pin)

    assert tokens_of(await collect(asker.generate, asked)) == expected_tokens(5)

    assert asked.trace.facts["prefill_instance"] == "a"
    assert "prefill_queue_ms" not in asked.trace.facts
    assert asked.trace.fallbacks == []


@pytest.fixture
async def own_server(tmp_path: Path, no_leaks: None) -> AsyncIterator[Queueing]:
    """A queue on a server that the test may kill."""
    with nats_server(tmp_path) as server:
        async with queueing(server) as queue:
            yield queue


async def test_without_nats_prefills_go_on_without_the_queue(own_server: Queueing) -> None:
    asker = await own_server.asker()
    taker = await own_server.taker(max_prefills=1)
    running, gate = await begun(taker, collect(asker.generate, request(5)))
    waiting, late = request(5), request(5)
    answer = asyncio.create_task(collect(asker.generate, waiting))
    await until(lambda: asker.asking.depth() == 1)

    await asyncio.to_thread(own_server.server.kill)

    gate.release()
    assert tokens_of(await running) == expected_tokens(5), "it has its worker"
    assert tokens_of(await answer) == expected_tokens(5)
    assert tokens_of(await collect(asker.generate, late)) == expected_tokens(5)
    for asked in (waiting, late):
        (fallback,) = asked.trace.fallbacks
        assert fallback.startswith("direct: the prefill queue cannot be reached: ")
        assert "prefill_queue_ms" not in asked.trace.facts
    assert asker.asking.depth() == 0


async def test_in_prefill_first_a_worker_without_nats_prefills_itself(
    nats: NatsServer, no_leaks: None
) -> None:
    async with queueing(nats, "prefill_first") as queue:
        decode = decode_worker()
        asker, taker = await queue.asker(decode=decode), await queue.taker()
        await asker.broker.close()
        asked = request(5)

        assert tokens_of(await collect(asker.generate, asked)) == expected_tokens(5)

        assert [len(each.llm.results) for each in (asker, taker)] == [1, 0]
        assert [each.partition(":")[0] for each in asked.trace.fallbacks] == ["direct"]
        assert "prefill_instance" not in asked.trace.facts
        await decode.idle()


class FullDisk(NatsClient):
    """JetStream does not reply to a push while the disk is full."""

    is_full = True
    num_pushes = 0

    def jetstream(self, **options: Any) -> JetStreamContext:
        stream = super().jetstream(**options)
        publish = stream.publish

        async def publish_if_there_is_room(*arguments: Any) -> PubAck:
            self.num_pushes += 1
            if self.is_full:
                raise nats.errors.TimeoutError
            return await publish(*arguments)

        stream.publish = publish_if_there_is_room  # type: ignore[method-assign, assignment]
        return stream


async def is_direct(asker: Asker) -> bool:
    asked = request(5)
    assert tokens_of(await collect(asker.generate, asked)) == expected_tokens(5)
    return bool(asked.trace.fallbacks)


async def test_one_request_in_a_pause_tries_a_queue_that_does_not_reply(
    queue: Queueing, caplog: pytest.LogCaptureFixture
) -> None:
    """The others would wait for NATS, each as long."""
    client = FullDisk()
    limits = QueueLimits(pause=2.0)
    broker = await Broker.connect(queue.server.url, queue.names, limits, client)
    asker, _ = await queue.asker(broker=broker), await queue.taker()

    assert [await is_direct(asker) for _ in range(3)] == [True] * 3
    assert client.num_pushes == 2

    client.is_full = False
    await asyncio.sleep(limits.pause)
    assert not await is_direct(asker)
    assert caplog.text.count("as with a full disk") == 1


async def test_a_full_stream_costs_the_direct_call(queue: Queueing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_disagg.prefill_queue.broker._MAX_TICKETS", 1)
    asker = await queue.asker()
    waiting = asyncio.create_task(collect(asker.generate, request(5)))
    await until(lambda: asker.asking.depth() == 1)
    # A worker that takes nothing: the stream stays full.
    full = await queue.taker(max_prefills=0)

    assert await is_direct(asker)
    assert len(full.llm.results) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
