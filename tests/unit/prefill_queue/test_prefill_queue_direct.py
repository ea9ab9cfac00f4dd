"""A prefill that the queue cannot take goes straight to a prefill worker, and the answer says so."""

from __future__ import annotations

import asyncio
from typing import Any

import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import PubAck

from tests.support.handling import collect, expected_tokens, request, tokens_of, until
from tests.support.nats_server import NatsServer
from tests.support.queueing import Pushing, Queueing, queueing
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.handlers.select import NoStage
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.prefill_queue.broker import Broker, NatsClient, QueueLimits

LARGE: dict[str, Any] = {"padding": "x" * (2 << 20)}


def workers(role: Role, strategy: str) -> RecordingStageClient:
    config = WorkerConfig(model="m", role=role, strategy=strategy)
    return RecordingStageClient(build_generate(config, recording_engine(), NoStage()))


async def decoding(queue: Queueing) -> tuple[Pushing, RecordingStageClient]:
    stage = workers(Role.PREFILL, "decode_first")
    return await queue.pusher(stage=stage), stage


async def test_request_too_large_for_nats_goes_directly_to_a_prefill_worker(queue: Queueing) -> None:
    (pushing, stage), pulling = await decoding(queue), await queue.puller()
    asked = request(5, **LARGE)

    assert tokens_of(await collect(pushing.generate, asked)) == expected_tokens(5)

    assert pulling.llm.results == []
    assert [body["errand"]["stage"] for body in stage.requests] == ["prefill"]
    (told,) = asked.trace.fallbacks
    assert told.startswith("direct: a request of 20")
    assert "NATS takes 1048576 (max_payload)" in told
    assert asked.trace.strategy == "decode_first"
    assert asked.trace.facts["prefill_instance"] == f"{stage.instance_ids()[0]:x}"
    assert not pushing.client.waiting_ages()
    await stage.idle()


@pytest.mark.parametrize(
    "pin", [{"annotations": ["disagg:next=a1"]}, {"routing": {"prefill_worker_id": 0xA1}}], ids=str
)
async def test_a_request_with_a_pinned_prefill_worker_passes_the_queue_by(
    queue: Queueing, pin: dict[str, Any]
) -> None:
    (pushing, stage), pulling = await decoding(queue), await queue.puller()
    asked = request(5, **pin)

    assert tokens_of(await collect(pushing.generate, asked)) == expected_tokens(5)

    assert (len(stage.requests), pulling.llm.results) == (1, [])
    assert asked.trace.fallbacks == []
    await stage.idle()


async def test_request_too_large_for_nats_is_prefilled_locally_in_prefill_first(
    nats: NatsServer, no_leaks: None
) -> None:
    async with queueing(nats, "prefill_first") as queue:
        stage = workers(Role.DECODE, "prefill_first")
        pushing, pulling = await queue.pusher(stage=stage), await queue.puller()
        asked = request(5, **LARGE)

        assert tokens_of(await collect(pushing.generate, asked)) == expected_tokens(5)

        assert [result.request_type for result in pushing.llm.results] == ["context_only"]
        assert pulling.llm.results == []
        assert [each.partition(":")[0] for each in asked.trace.fallbacks] == ["direct"]
        assert "prefill_instance" not in asked.trace.facts
        await stage.idle()


async def test_without_nats_prefills_go_on_without_the_queue(tmp_path: Any, no_leaks: None) -> None:
    server = NatsServer(tmp_path)
    server.start()
    try:
        async with queueing(server) as queue:
            pushing, stage = await decoding(queue)
            waiting, late = request(5), request(5)
            answer = asyncio.create_task(collect(pushing.generate, waiting))
            await until(lambda: pushing.client.waiting_ages())

            await asyncio.to_thread(server.kill)

            assert tokens_of(await answer) == expected_tokens(5)
            assert tokens_of(await collect(pushing.generate, late)) == expected_tokens(5)
            for asked in (waiting, late):
                # The client's own words, if a request hears of it before the connection does.
                (fallback,) = asked.trace.fallbacks
                assert fallback.startswith("direct: the prefill queue cannot be reached: ")
            assert len(stage.requests) == 2
            await stage.idle()
    finally:
        server.kill()


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


async def test_one_request_in_a_pause_tries_a_queue_that_does_not_reply(
    queue: Queueing, caplog: pytest.LogCaptureFixture
) -> None:
    """The others would wait for NATS, each as long."""
    stage, client = workers(Role.PREFILL, "decode_first"), FullDisk()
    limits = QueueLimits(pause=4.0)
    broker = await Broker.connect(queue.server.url, queue.names, limits, client)
    pushing = await queue.pusher(stage=stage, broker=broker)

    for _ in range(3):
        assert tokens_of(await collect(pushing.generate, request(5))) == expected_tokens(5)
    assert (client.num_pushes, len(stage.requests)) == (2, 3)

    client.is_full = False
    pulling = await queue.puller()
    await until(lambda: broker.takes_items)
    assert tokens_of(await collect(pushing.generate, request(5))) == expected_tokens(5)

    assert (len(pulling.llm.results), len(stage.requests)) == (1, 3)
    assert caplog.text.count("as with a full disk") == 1
    await stage.idle()
