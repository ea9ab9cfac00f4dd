"""The prefill queue over a real NATS server: who pushes gets one answer, who pulls takes what it has room for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.handling import PROMPT, collect, expected_tokens, request, tokens_of, until
from tests.nats_server import NatsServer, nats_server
from tests.queueing import Queueing, queueing, raising
from trtllm_disagg.config import Role, ScheduleStyle, Strategy, WorkerConfig
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    PeerUnavailableError,
    RequestCancelledError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.remote import NoStage
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.prefill_queue import NoPrefillQueue, broker, open_prefill_queue, pulling
from trtllm_disagg.prefill_queue.names import Names
from trtllm_disagg.testing.context import FakeContext
from trtllm_disagg.testing.pair import recording_engine
from trtllm_disagg.testing.recording_llm import LLM, Script
from trtllm_disagg.testing.stage_client import RecordingStageClient


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
async def queue(server: NatsServer, no_leaks: None) -> AsyncIterator[Queueing]:
    async with queueing(server) as opened:
        yield opened


async def depth_is(queue: Queueing, depth: int) -> None:
    await until(lambda: queue.pushers[0].watch.depth() == depth)


def blocked() -> tuple[Script, asyncio.Semaphore]:
    gate = asyncio.Semaphore(0)
    return Script(gate=gate), gate


async def test_a_pulled_prefill_and_a_local_decode_are_one_answer(queue: Queueing) -> None:
    pushing, pulling = await queue.pusher(), await queue.puller(0xBEEF)
    asked = request(6)

    chunks = await collect(pushing.generate, asked)

    assert tokens_of(chunks) == expected_tokens(6)
    assert [result.request_type for result in pulling.llm.results] == ["context_only"]
    assert [result.request_type for result in pushing.llm.results] == ["generation_only"]
    assert asked.journey.facts["prefill_instance"] == "beef"
    assert asked.journey.facts["prefill_queue_ms"] >= 0


async def test_the_request_id_comes_with_the_item(queue: Queueing) -> None:
    seen: list[str | None] = []
    engine = recording_engine()
    config = WorkerConfig(model="org/model", role=Role.PREFILL)
    whole = build_generate(config, engine, NoStage())

    def serve(asked, context):  # type: ignore[no-untyped-def]
        seen.append(context.id())
        return whole(asked, context)

    pushing = await queue.pusher()
    await queue.puller(serve=serve)
    await collect(pushing.generate, request(3), FakeContext("request-77"))

    assert seen == ["request-77"]


async def test_in_prefill_first_any_prefill_worker_has_the_prefill_and_decode_gets_the_handoff(
    server: NatsServer, no_leaks: None
) -> None:
    async with queueing(server, Strategy.PREFILL_FIRST) as queue:
        engine = recording_engine()
        decode_config = WorkerConfig(model="m", role=Role.DECODE, strategy=Strategy.PREFILL_FIRST)
        stage = RecordingStageClient(build_generate(decode_config, engine, NoStage()))
        pushing, pulling = await queue.pusher(stage=stage), await queue.puller()

        chunks = await collect(pushing.generate, request(6))

        assert tokens_of(chunks) == expected_tokens(6)
        assert pushing.llm.results == []
        assert [result.request_type for result in pulling.llm.results] == ["context_only"]
        await stage.idle()


async def test_in_prefill_first_a_decode_worker_lets_go_of_what_no_decode_was_started_for(
    server: NatsServer, no_leaks: None
) -> None:
    async with queueing(server, Strategy.PREFILL_FIRST) as queue:
        engine = recording_engine()
        decode_config = WorkerConfig(model="m", role=Role.DECODE, strategy=Strategy.PREFILL_FIRST)
        stage = RecordingStageClient(build_generate(decode_config, engine, NoStage()))
        pushing = await queue.pusher(stage=stage)
        await queue.puller()
        answer = pushing.generate(request(6), FakeContext())

        first = await anext(answer)
        assert len(LLM.kv_store) == 1
        await answer.aclose()

        assert first.token_ids == expected_tokens(1)
        await until(lambda: len(LLM.kv_store) == 0)
        await stage.idle()
        assert [asked["stop_conditions"] for asked in stage.requests] == [{"max_tokens": 1}]


async def test_a_worker_never_takes_more_than_it_has_room_for(queue: Queueing) -> None:
    pushing = await queue.pusher()
    scripts = [blocked() for _ in range(5)]
    one = await queue.puller(1, max_items=2)
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


async def test_room_is_counted_in_tokens_of_one_step(queue: Queueing) -> None:
    pushing = await queue.pusher()
    scripts = [blocked() for _ in range(4)]
    one = await queue.puller(1, max_tokens=len(PROMPT) + 1)
    one.llm.scripts.extend(script for script, _ in scripts)
    asked = [asyncio.create_task(collect(pushing.generate, request(2))) for _ in range(4)]

    # The second fills the step, and that is all.
    await until(lambda: len(one.llm.results) == 2)
    await depth_is(queue, 2)
    assert len(one.llm.results) == 2

    for _, gate in scripts:
        gate.release()
    await asyncio.gather(*asked)


async def test_depth_and_age_are_those_of_what_waits(queue: Queueing) -> None:
    pushing, watching = await queue.pusher(), await queue.pusher()
    assert (pushing.watch.depth(), pushing.watch.age()) == (0, 0.0)
    asked = [asyncio.create_task(collect(pushing.generate, request(2))) for _ in range(3)]

    await until(lambda: pushing.client.num_waiting == 3)
    assert pushing.watch.depth() == 3, "its own it knows at once"
    await until(lambda: watching.watch.depth() == 3)
    await until(lambda: watching.watch.age() > 0.1)
    assert watching.watch.age() < 5

    await queue.puller()
    await asyncio.gather(*asked)
    await until(lambda: (watching.watch.depth(), watching.watch.age()) == (0, 0.0))


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
    script, gate = blocked()
    pulling.llm.scripts.append(script)
    context = FakeContext()
    asked = asyncio.create_task(collect(pushing.generate, request(4), context))
    await until(lambda: pulling.llm.results)

    context.stop()
    with pytest.raises(RequestCancelledError):
        await asked
    await until(lambda: pulling.llm.results[0].is_aborted)
    gate.release()
    # Its room is free again.
    assert tokens_of(await collect(pushing.generate, request(4))) == expected_tokens(4)


async def test_a_handoff_that_nobody_takes_is_let_go(queue: Queueing) -> None:
    """The pusher dies while the prefill runs: its answer finds nobody."""
    pushing, pulling = await queue.pusher(), await queue.puller()
    script, gate = blocked()
    pulling.llm.scripts.append(script)
    asked = asyncio.create_task(collect(pushing.generate, request(4)))
    await until(lambda: pulling.llm.results)
    await pushing.broker.close()

    gate.release()
    await until(lambda: pulling.llm.results[0].finished)
    await until(lambda: len(LLM.kv_store) == 0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_what_waits_too_long_fails_by_name_and_leaves_the_queue(queue: Queueing) -> None:
    pushing = await queue.pusher(timeout=0.3)
    with pytest.raises(StageTimeoutError, match=r"within 0\.3 s \(--queue-timeout\)") as raised:
        await collect(pushing.generate, request(4))
    assert raised.value.peer == 0
    await depth_is(queue, 0)
    pulling = await queue.puller()
    assert tokens_of(await collect(pushing.generate, request(4))) == expected_tokens(4)
    assert len(pulling.llm.results) == 1


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("bad"),
        OverloadedError("full"),
        PeerUnavailableError("gone"),
        StageTimeoutError("late"),
        EngineError("broken"),
    ],
)
async def test_a_prefill_workers_error_arrives_as_it_was(queue: Queueing, error: DisaggError) -> None:
    pushing = await queue.pusher()
    await queue.puller(0xC, serve=raising(error))
    with pytest.raises(type(error), match=str(error)) as raised:
        await collect(pushing.generate, request(4))
    assert type(raised.value) is type(error)
    assert raised.value.peer == 0xC


async def test_a_bug_in_a_prefill_worker_costs_this_request_only(
    queue: Queueing, caplog: pytest.LogCaptureFixture
) -> None:
    pushing = await queue.pusher()
    await queue.puller(serve=raising(KeyError("oops")))
    for _ in range(2):
        with pytest.raises(EngineError, match="KeyError: 'oops'"):
            await collect(pushing.generate, request(4))
    assert "failed unexpectedly" in caplog.text


async def test_a_request_goes_to_no_instance_that_has_failed_it(queue: Queueing) -> None:
    pushing = await queue.pusher()
    failed, other = await queue.puller(1), await queue.puller(2)
    for _ in range(6):
        asked = request(3).avoiding(1)
        assert tokens_of(await collect(pushing.generate, asked)) == expected_tokens(3)
        assert asked.journey.facts["prefill_instance"] == "2"
    assert (len(failed.llm.results), len(other.llm.results)) == (0, 6)


async def test_where_only_that_one_is_there_the_request_fails(
    queue: Queueing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "MAX_OFFERS", 5)
    pushing = await queue.pusher()
    await queue.puller(1)
    with pytest.raises(PeerUnavailableError, match="no other prefill worker takes this request"):
        await collect(pushing.generate, request(3).avoiding(1))


async def test_a_queue_that_has_failed_a_request_is_not_picked_again(queue: Queueing) -> None:
    pushing = await queue.pusher()
    with pytest.raises(PeerUnavailableError):
        await pushing.client.pick(request().avoiding(0))


async def test_a_worker_that_is_told_to_stop_ends_what_it_has_and_leaves_the_rest(queue: Queueing) -> None:
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


async def test_a_prefill_worker_of_the_queue_pulls_and_one_without_it_opens_nothing(
    server: NatsServer,
) -> None:
    config = WorkerConfig(model="m", role=Role.PREFILL)
    assert isinstance(await open_prefill_queue(config), NoPrefillQueue)
    # A second stage that decodes calls nobody and prefills nothing.
    decode = WorkerConfig(
        model="m",
        role=Role.DECODE,
        strategy=Strategy.PREFILL_FIRST,
        prefill_dispatch="queue",
        nats_server="nats://127.0.0.1:1",
    )
    assert isinstance(await open_prefill_queue(decode), NoPrefillQueue)


def test_both_sides_mean_the_same_queue() -> None:
    for strategy in (Strategy.DECODE_FIRST, Strategy.AUTO):
        decode, prefill = (
            WorkerConfig(model="m", role=role, strategy=strategy, prefill_dispatch="queue")
            for role in (Role.DECODE, Role.PREFILL)
        )
        assert Names.of(decode) == Names.of(prefill)


async def test_no_nats_server_is_said_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_CONNECT_SECONDS", 0.3)
    config = WorkerConfig(
        model="m", role=Role.PREFILL, prefill_dispatch="queue", nats_server="nats://me:secret@127.0.0.1:1"
    )
    with pytest.raises(ConfigError) as raised:
        await open_prefill_queue(config)
    said = str(raised.value)
    assert said.startswith(
        "--nats-server: 'nats://***@127.0.0.1:1' is not allowed; expected nats://host:port"
    )
    assert "secret" not in said
    assert "JetStream" in said


async def test_a_server_without_jetstream_is_refused(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, jetstream=False)
    server.start()
    config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue", nats_server=server.url)
    try:
        with pytest.raises(ConfigError, match=r"has JetStream .nats-server -js.: this one has none"):
            await open_prefill_queue(config)
    finally:
        server.kill()


def test_both_phases_at_once_need_to_know_the_prefill_worker() -> None:
    with pytest.raises(ConfigError, match=r"--prefill-dispatch: 'queue' .* direct with --schedule-style"):
        WorkerConfig(
            model="m",
            role=Role.DECODE,
            prefill_dispatch="queue",
            schedule_style=ScheduleStyle.GENERATION_FIRST,
        )
