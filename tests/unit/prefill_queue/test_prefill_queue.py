"""The prefill queue over a real NATS server: a push gets one answer, or one error, from one worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import PubAck

from tests.support.handling import ORDERS, collect, expected_tokens, request, tokens_of, until
from tests.support.nats_server import NatsServer, nats_server
from tests.support.queueing import Pushing, Queueing, queueing, raising
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import FakeContext, RecordingStageClient
from tests.support.trying import trying
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    PeerUnavailableError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.chain import PrefillService
from trtllm_disagg.handlers.local import LocalPrefill
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.handlers.select import NoStage
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.prefill_queue.broker import Broker, NatsClient, QueueLimits
from trtllm_disagg.types import GenerateRequest, Handoff, RequestContext, TokenChunk


async def test_pulled_prefill_and_local_decode_give_the_whole_answer(queue: Queueing) -> None:
    pushing, pulling = await queue.pusher(), await queue.puller(0xBEEF)
    asked = request(6)

    chunks = await collect(pushing.generate, asked)

    assert tokens_of(chunks) == expected_tokens(6)
    assert [result.request_type for result in pulling.llm.results] == ["context_only"]
    assert [result.request_type for result in pushing.llm.results] == ["generation_only"]
    assert asked.trace.facts["prefill_instance"] == "beef"
    assert asked.trace.facts["prefill_queue_ms"] >= 0


@pytest.mark.parametrize(
    ("request_id", "comes"),
    [("request-77", "request-77"), ("a\n2026 a forged line", None), ("x" * 257, None)],
)
async def test_a_request_id_that_fits_comes_with_the_item(
    queue: Queueing, request_id: str, comes: str | None
) -> None:
    seen: list[str | None] = []
    engine = recording_engine()
    config = WorkerConfig(model="org/model", role=Role.PREFILL)
    whole = build_generate(config, engine, NoStage())

    def serve(asked, context):  # type: ignore[no-untyped-def]
        seen.append(context.id())
        return whole(asked, context)

    pushing = await queue.pusher()
    await queue.puller(serve=serve)
    await collect(pushing.generate, request(3), FakeContext(request_id))

    assert seen == [comes]


def workers(role: Role, strategy: str) -> RecordingStageClient:
    config = WorkerConfig(model="m", role=role, strategy=strategy)
    return RecordingStageClient(build_generate(config, recording_engine(), NoStage()))


async def test_in_prefill_first_any_prefill_worker_has_the_prefill_and_decode_gets_the_handoff(
    nats: NatsServer, no_leaks: None
) -> None:
    async with queueing(nats, "prefill_first") as queue:
        stage = workers(Role.DECODE, "prefill_first")
        pushing, pulling = await queue.pusher(stage=stage), await queue.puller()

        chunks = await collect(pushing.generate, request(6))

        assert tokens_of(chunks) == expected_tokens(6)
        assert pushing.llm.results == []
        assert [result.request_type for result in pulling.llm.results] == ["context_only"]
        await stage.idle()


@pytest.mark.parametrize("strategy", ORDERS)
async def test_the_prefill_worker_is_told_that_decode_has_the_kv(nats: NatsServer, strategy: str) -> None:
    """Else it would keep what it needs for a recall until the lease ends."""
    async with queueing(nats, strategy) as queue:
        kinds: list[str] = []
        recalls = Recalls(tuple, 60.0)
        prefill = PrefillService(LocalPrefill(recording_engine()), recalls)
        serve = replace(trying(prefill, resumes=False), notices=recalls)

        def heard(asked: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
            assert asked.phase_request is not None
            kinds.append(asked.phase_request.kind)
            return serve(asked, context)

        stage = (
            workers(Role.DECODE, "prefill_first") if strategy == "prefill_first" else RecordingStageClient()
        )
        pushing = await queue.pusher(stage=stage)
        await queue.puller(serve=heard)

        assert tokens_of(await collect(pushing.generate, request(6))) == expected_tokens(6)

        await until(lambda: kinds == ["prefill", "taken"])
        await stage.idle()


async def test_in_prefill_first_a_handoff_without_a_decode_is_released(
    nats: NatsServer, no_leaks: None
) -> None:
    async with queueing(nats, "prefill_first") as queue:
        stage = workers(Role.DECODE, "prefill_first")
        pushing = await queue.pusher(stage=stage)
        await queue.puller()
        answer = pushing.generate(request(6), FakeContext())

        first = await anext(answer)
        assert len(LLM.kv_store) == 1
        await answer.aclose()

        assert first.token_ids == expected_tokens(1)
        await until(lambda: len(LLM.kv_store) == 0)
        assert stage.requests == [], "the worker that has prefilled releases it"


async def test_in_prefill_first_a_handoff_that_no_decode_worker_fetches_is_recalled(nats: NatsServer) -> None:
    """Else dead decode workers would fill the prefill workers' pools with what is never fetched."""
    async with queueing(nats, "prefill_first") as queue:
        released: list[Handoff] = []
        phase = LocalPrefill(recording_engine())

        async def prefill(request: GenerateRequest, context: RequestContext) -> Handoff:
            handoff = await phase(request, context)
            handoff.on_release = released.append
            return handoff

        pushing = await queue.pusher(stage=RecordingStageClient(raising(PeerUnavailableError("gone"))))
        recalls = Recalls(tuple, 60.0)
        service = trying(PrefillService(prefill, recalls), resumes=False)
        await queue.puller(serve=replace(service, notices=recalls))

        with pytest.raises(PeerUnavailableError):
            await collect(pushing.generate, request(6))

        await until(lambda: released)
        LLM.forget_instances()


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("bad"),
        OverloadedError("full"),
        PeerUnavailableError("gone"),
        StageTimeoutError("late"),
        EngineError("broken"),
        KeyError("oops"),
    ],
)
async def test_a_prefill_workers_error_arrives_as_it_was_and_a_bug_as_the_engines(
    queue: Queueing, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    pushing = await queue.pusher()
    await queue.puller(0xC, serve=raising(error))
    arrives_as = type(error) if isinstance(error, DisaggError) else EngineError
    for _ in range(2):
        with pytest.raises(arrives_as, match=str(error)) as raised:
            await collect(pushing.generate, request(4))
        assert type(raised.value) is arrives_as
        assert raised.value.peer == 0xC
    assert ("failed unexpectedly" in caplog.text) is isinstance(error, KeyError)


async def test_a_request_goes_to_no_instance_that_has_failed_it(queue: Queueing) -> None:
    queue.limits = QueueLimits(offers=5)
    pushing, failed = await queue.pusher(), await queue.puller(1)
    with pytest.raises(PeerUnavailableError, match="no other prefill worker takes this request"):
        await collect(pushing.generate, request(3).avoiding(1))
    with pytest.raises(PeerUnavailableError):
        await pushing.client.pick(request().avoiding(0))  # the queue itself
    other = await queue.puller(2)
    for _ in range(6):
        asked = request(3).avoiding(1)
        assert tokens_of(await collect(pushing.generate, asked)) == expected_tokens(3)
        assert asked.trace.facts["prefill_instance"] == "2"
    assert (len(failed.llm.results), len(other.llm.results)) == (0, 6)


# -- what the queue cannot take goes straight to a prefill worker, and the answer says so


LARGE: dict[str, Any] = {"padding": "x" * (2 << 20)}


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
    with nats_server(tmp_path) as server:
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
