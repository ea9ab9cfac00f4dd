"""The order in which a worker leaves: out of discovery, wait for what runs, hand the rest back, end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import cast

import pytest

from tests.support.day_one import Both
from tests.support.handling import collect, request, until
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import FakeContext
from tests.support.trying import tracked
from tests.unit.worker.test_stage_state import serving_life
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.dynamo_runtime.registration import Registration
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.readers import EngineReaders
from trtllm_disagg.errors import WorkerLeavingError
from trtllm_disagg.handlers.drain import WorkerDrain, in_background
from trtllm_disagg.handlers.local import LocalAgg, LocalPrefill
from trtllm_disagg.prefill_queue import WorkerQueue
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk
from trtllm_disagg.worker.leaving import Leaving
from trtllm_disagg.worker.life import Event, State


class Place:
    """Discovery, the gate of its namespace, and the prefill queue; what was done, in order. A worker of it leaves."""

    def __init__(
        self,
        drain: WorkerDrain | None = None,
        engine: Engine | None = None,
        *,
        seconds: float = 30.0,
        grace: float = 0.0,
        broken: bool = False,
        is_first: bool = False,
        leave_seconds: float = 5.0,
    ) -> None:
        self.done: list[str] = []
        self.life = serving_life()
        self.drain = drain or WorkerDrain()
        engine = engine or recording_engine()
        self.leaving = Leaving(
            self.life,
            cast(Registration, self),
            self.drain,
            engine,
            cast(WorkerQueue, self),
            seconds,
            leave_seconds,
        )
        self.ended = asyncio.Event()
        self.grace_seconds = grace
        self._is_first = is_first
        self._broken = broken
        self._running = asyncio.create_task(self._run())

    @property
    def cards(self) -> Place:
        return self

    async def _run(self) -> None:
        await self.life.ended(asyncio.ensure_future(asyncio.Event().wait()))  # type: ignore[arg-type]
        await self.leaving.run()
        self.done.append("over")
        self.ended.set()

    async def stop_frontends(self, *, closes_namespace: bool) -> bool:
        if self._is_first:
            self.done.append("close the namespace" if closes_namespace else "stop frontends")
            if self._broken:
                raise RuntimeError("discovery is gone")
        return self._is_first

    async def leave(self) -> None:
        self.done.append("leave the queue")
        if self._broken:
            raise RuntimeError("discovery is gone")

    async def unlist(self) -> None:
        self.done.append("unlist")

    async def open_namespace(self) -> None:
        if self._is_first and "open" not in self.done:
            self.done.append("open")


class Hanging(Place):
    async def unlist(self) -> None:
        await asyncio.Event().wait()


async def relayed(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
    """An answer that this worker's engine has no part in, and that never ends."""
    yield TokenChunk([1])
    await asyncio.Event().wait()


async def test_a_first_stage_leaves_frontends_and_then_discovery() -> None:
    place, with_all, alone = (Place(is_first=True, grace=0.2) for _ in range(3))
    place.life.happened(Event.STOP)
    await with_all.leaving.finish(1.0)
    await alone.leaving.finish(1.0, others_stay=True)
    ways = ((place, "stop frontends"), (with_all, "close the namespace"), (alone, "stop frontends"))
    for each, stops in ways:
        await each.ended.wait()
        assert each.done == ["leave the queue", stops, "unlist", "open", "over"]


async def test_a_second_stage_refuses_calls_before_it_leaves_discovery() -> None:
    """A caller drops a call that it is just sending then, and no decode worker would fetch the KV of that prefill."""
    place = Place(grace=1.0)
    running = place.drain.enter()
    place.life.happened(Event.STOP)
    await until(lambda: place.done == ["leave the queue"])
    await asyncio.sleep(0)
    with pytest.raises(WorkerLeavingError, match="SIGTERM"):
        place.drain.enter()
    assert place.done == ["leave the queue"], "the worker would refuse its items"
    await until(lambda: "unlist" in place.done)
    assert place.drain.num_running == 1
    place.drain.leave(running)
    await place.ended.wait()


async def test_an_idle_worker_leaves_and_ends_after_its_grace_period() -> None:
    stopped, died = Place(grace=600), Place(grace=600)
    stopped.life.happened(Event.STOP)
    died.life.happened(Event.DIED)
    await died.ended.wait()
    await until(lambda: "unlist" in stopped.done)
    await asyncio.sleep(0)
    assert (stopped.done, stopped.life.state) == (["leave the queue", "unlist"], State.UNLISTED)
    assert died.done == ["leave the queue", "unlist", "over"]


@pytest.mark.parametrize("work", ["relayed request", "KV that may be read", "behind an answer"])
async def test_work_is_waited_for_however_idle_the_engine_is(work: str) -> None:
    """KV also where no statistics say so, as TensorRT-LLM is by default."""
    drain, gate, engine = WorkerDrain(), asyncio.Event(), recording_engine()
    place = Place(drain, engine)

    async def one_more(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        await gate.wait()
        yield TokenChunk([1], finish_reason="stop")

    async def drained() -> None:
        await gate.wait()

    end: Callable[[], object] = gate.set
    if work == "relayed request":
        answering = asyncio.create_task(collect(tracked(drain, one_more), request()))
        await until(lambda: drain.num_running)
    elif work == "KV that may be read":
        end = engine.handoffs.hold()
    else:
        in_background(drained(), "a drain")
    place.life.happened(Event.STOP)
    await until(lambda: "unlist" in place.done)
    await asyncio.sleep(0.1)
    assert not place.ended.is_set()
    end()
    await place.ended.wait()
    if work == "relayed request":
        assert len(await answering) == 1


async def test_requests_beyond_drain_seconds_are_handed_back_before_the_runtime_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place(seconds=0.0)
    answering = asyncio.create_task(collect(tracked(place.drain, relayed), request()))
    await until(lambda: place.drain.num_running)
    place.life.happened(Event.STOP)
    with pytest.raises(WorkerLeavingError):
        await answering
    await place.ended.wait()
    assert "1 requests still run after 0 s" in caplog.text


async def test_pause_logs_at_once_that_its_engine_cannot_be_asked_and_ends_once_it_can(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(engine: Engine) -> bool:
        raise RuntimeError("its socket is closed")

    place = Place(seconds=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "is_idle", unknown)
        place.life.command(Event.PAUSE)
        why = "cannot ask the engine whether it is idle: its socket is closed"
        await until(lambda: place.leaving.waits_for)
        assert (place.leaving.waits_for, place.leaving.is_paused) == (why, False)
    await until(lambda: place.leaving.is_paused)
    assert (place.leaving.waits_for, caplog.messages.count(why)) == (None, 1)
    place.leaving.resume()
    await place.ended.wait()


async def test_a_dead_engine_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    engine = recording_engine()
    place = Place(engine=engine)
    engine.handoffs.hold()
    engine.die("gone")
    place.life.happened(Event.DIED)
    await place.ended.wait()
    assert "still run" not in caplog.text


async def test_a_second_reason_to_leave_begins_nothing_anew() -> None:
    place = Place(grace=600)
    place.life.happened(Event.DIED)
    place.life.happened(Event.STOP)
    await place.ended.wait()
    assert place.done.count("unlist") == 1
    with pytest.raises(WorkerLeavingError, match="this worker is leaving"):
        await collect(tracked(place.drain, LocalAgg(recording_engine())), request())


async def test_a_worker_that_flips_leaves_as_soon_as_no_request_comes_any_more() -> None:
    """A request that comes meanwhile is answered. A quarter of ten minutes would be longer than this test may take."""
    place, loop = Place(is_first=True, grace=2.0), asyncio.get_running_loop()
    place.life.command(Event.FLIP, Role.DECODE)
    await until(lambda: place.done == ["leave the queue", "stop frontends"])
    answers = await collect(tracked(place.drain, LocalAgg(recording_engine())), request(max_tokens=1))
    assert len(answers) == 1
    called = loop.time()
    await place.ended.wait()
    assert 0.4 < loop.time() - called < 2
    assert place.life.becomes is Role.DECODE


async def test_a_flip_opens_the_namespace_when_its_grace_period_is_over_while_requests_drain() -> None:
    """Another first stage may have come meanwhile, and the last request may take minutes."""
    place = Place(is_first=True, grace=0.4)
    running = place.drain.enter()
    place.life.command(Event.FLIP, Role.DECODE)
    async with asyncio.timeout(5):
        await until(lambda: "open" in place.done)
    assert (place.life.state, place.drain.num_running) == (State.DRAINING, 1)
    place.drain.leave(running)
    await place.ended.wait()


async def test_an_order_to_stop_ends_a_flip_and_one_to_flip_ends_no_stop() -> None:
    place = Place()
    running = place.drain.enter()
    place.life.command(Event.FLIP, Role.DECODE)
    await until(lambda: place.drain.has_begun)
    with pytest.raises(WorkerLeavingError, match="it becomes a decode worker"):
        raise place.drain.error()
    place.life.happened(Event.STOP)
    assert place.life.becomes is None
    with pytest.raises(WorkerLeavingError, match="takes no flip now: it is"):
        place.life.command(Event.FLIP, Role.PREFILL)
    place.drain.leave(running)
    await place.ended.wait()
    assert not place.life.reason.has_next


@pytest.mark.parametrize("seconds", [0.05, 600.0])
async def test_a_worker_told_to_leave_answers_when_its_requests_have_ended_or_its_time(
    seconds: float,
) -> None:
    place = Place(seconds=0.0)
    answer = asyncio.create_task(collect(tracked(place.drain, relayed), request()))
    await until(lambda: place.drain.num_running)
    finishing = asyncio.create_task(place.leaving.finish(seconds))
    if seconds > 1:
        await until(lambda: "unlist" in place.done)
        assert not finishing.done(), "the command's time counts, not the worker's"
        answer.cancel()
    assert await finishing == (seconds < 1)
    await place.ended.wait()
    await asyncio.gather(answer, return_exceptions=True)


@pytest.mark.parametrize(
    ("place", "said"), [(Place, "discovery is gone"), (Hanging, "a step of leaving discovery took more than")]
)
async def test_a_worker_that_cannot_leave_discovery_ends_all_the_same(
    place: type[Place], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    here = place(broken=True, is_first=True, grace=0.1, leave_seconds=0.05)
    here.life.happened(Event.STOP)
    async with asyncio.timeout(30):
        await here.ended.wait()
    assert "a step of leaving discovery failed: RuntimeError('discovery is gone')" in caplog.text
    assert said in caplog.text
    assert here.done[-1] == "over"


@asynccontextmanager
async def stages() -> AsyncIterator[dict[Role, Engine]]:
    """Both workers of decode_first on `tensorrt_llm`; the prefill worker reads its engine's statistics."""
    both = Both("decode_first", enable_iter_perf_stats=True)
    prefill = both.engines[Role.PREFILL]
    async with EngineReaders(prefill, 32, reads_statistics=True):
        await collect(both.handlers[Role.DECODE], request(max_tokens=5))
        yield both.engines


async def test_leaving_worker_gives_an_idle_engine_a_step_to_get_a_statistic(
    tensorrt_llm: ModuleType,
) -> None:
    """Decode has the KV; without a request TensorRT-LLM says so to no reader, and this would last for the lease."""
    async with stages() as engines:
        engine = engines[Role.PREFILL]
        place = Place(engine=engine)
        await until(lambda: engine.handoffs.has_statistics)
        assert engine.handoffs.count() == 1
        place.life.happened(Event.STOP)
        async with asyncio.timeout(10):
            await place.ended.wait()
        assert engine.handoffs.count() == 0


async def test_leaving_worker_waits_while_statistics_show_held_kv(tensorrt_llm: ModuleType) -> None:
    async with stages() as engines:
        engine = engines[Role.PREFILL]
        place = Place(engine=engine)
        held = await prefilled(engine)
        place.life.happened(Event.STOP)
        steps = len(engine.llm.results)
        await until(lambda: len(engine.llm.results) >= steps + 2)
        assert not place.ended.is_set()
        await engines[Role.DECODE].start_decode(held).aresult()
        async with asyncio.timeout(10):
            await place.ended.wait()


async def prefilled(engine: Engine) -> GenerateRequest:
    """With a handoff that no decode has taken yet."""
    asked = request(max_tokens=5)
    return asked.with_handoff(await LocalPrefill(engine)(asked, FakeContext()))


async def test_leaving_worker_gives_no_step_to_an_engine_without_statistics() -> None:
    engine = recording_engine()
    place = Place(engine=engine, seconds=0.2)
    engine.handoffs.hold()
    place.life.happened(Event.STOP)
    await place.ended.wait()
    assert engine.llm.calls_of("generate_async") == []
