"""The order in which a worker leaves: out of discovery, wait for what runs, hand the rest back, end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import ModuleType

import pytest

from tests.support.day_one import Both
from tests.support.handling import collect, request, until
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import FakeContext
from tests.support.trying import tracked
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.dynamo_runtime.shutdown import Leaving
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.readers import EngineReaders
from trtllm_disagg.errors import WorkerLeavingError
from trtllm_disagg.handlers.cancellation import WorkerDrain, in_background
from trtllm_disagg.handlers.local import LocalAgg, LocalPrefill
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk


class Place(Runtime):
    """Discovery and the runtime, and the prefill queue; what was done, in order."""

    def __init__(self, broken: bool = False, is_first: bool = False) -> None:
        self.done: list[str] = []
        self._is_first = is_first
        self._broken = broken
        self.ended = asyncio.Event()

    async def hide(self, *, with_namespace: bool) -> bool:
        if self._is_first:
            self.done.append("hide the namespace" if with_namespace else "hide")
            if self._broken:
                raise RuntimeError("discovery is gone")
        return self._is_first

    async def leave(self) -> None:
        self.done.append("leave")
        if self._broken:
            raise RuntimeError("discovery is gone")

    async def open_namespace(self) -> None:
        if self._is_first:
            self.done.append("open")

    async def drained(self) -> None:
        self.done.append("queue drained")

    def shutdown(self) -> None:
        self.done.append("shutdown")
        self.ended.set()


class Hanging(Place):
    async def leave(self) -> None:
        await asyncio.Event().wait()


def leaving(place: Place, drain: WorkerDrain, engine: Engine, seconds: float = 30.0) -> Leaving:
    return Leaving(place, drain, engine, place, seconds)


async def relayed(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
    """An answer that this worker's engine has no part in, and that never ends."""
    yield TokenChunk([1])
    await asyncio.Event().wait()


async def test_a_first_stage_leaves_frontends_and_then_discovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "1")
    place, command = Place(is_first=True), Place(is_first=True)
    leaving(place, WorkerDrain(), recording_engine()).leave("SIGTERM", grace_seconds=0.2)
    await leaving(command, WorkerDrain(), recording_engine()).finish(1.0)
    for each, hides in ((place, "hide"), (command, "hide the namespace")):
        await each.ended.wait()
        assert each.done == ["leave", hides, "leave", "open", "queue drained", "shutdown"]


async def test_a_second_stage_refuses_calls_before_it_leaves_discovery() -> None:
    """A caller drops a call that it is just sending then, and no decode worker would fetch the KV of that prefill."""
    place, drain = Place(), WorkerDrain()
    running = drain.enter()
    leaving(place, drain, recording_engine()).leave("SIGTERM", grace_seconds=1.0)
    await asyncio.sleep(0.1)
    assert place.done == ["leave"], "the queue, whose items would be refused"
    with pytest.raises(WorkerLeavingError, match="SIGTERM"):
        drain.enter()
    await until(lambda: place.done == ["leave", "leave"])
    assert drain.num_running == 1
    drain.leave(running)
    await place.ended.wait()


async def test_an_idle_worker_leaves_and_ends_after_its_grace_period() -> None:
    for grace_seconds in (600, 0):
        place = Place()
        leaving(place, WorkerDrain(), recording_engine()).leave("SIGTERM", grace_seconds=grace_seconds)
        await until(lambda: place.ended.is_set() or (grace_seconds and place.done == ["leave", "leave"]))  # noqa: B023
        await asyncio.sleep(0)
        assert place.done == ["leave", "leave", *(() if grace_seconds else ("queue drained", "shutdown"))]


@pytest.mark.parametrize("work", ["relayed request", "KV that may be read", "behind an answer"])
async def test_work_is_waited_for_however_idle_the_engine_is(work: str) -> None:
    """KV also where no statistics say so, as TensorRT-LLM is by default."""
    place, drain, gate, engine = Place(), WorkerDrain(), asyncio.Event(), recording_engine()

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
    leaving(place, drain, engine).leave("SIGTERM or SIGINT")
    await until(lambda: "queue drained" in place.done)
    await asyncio.sleep(0.1)
    assert not place.ended.is_set()
    end()
    await place.ended.wait()
    if work == "relayed request":
        assert len(await answering) == 1


async def test_requests_beyond_drain_seconds_are_handed_back_before_the_runtime_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place, drain = Place(), WorkerDrain()
    answering = asyncio.create_task(collect(tracked(drain, relayed), request()))
    await until(lambda: drain.num_running)
    leaving(place, drain, recording_engine(), seconds=0.0).leave("SIGTERM or SIGINT")
    with pytest.raises(WorkerLeavingError):
        await answering
    await place.ended.wait()
    assert "1 requests still run after 0 s" in caplog.text


async def test_a_dead_engine_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    place, engine = Place(), recording_engine()
    engine.handoffs.hold()
    engine.die("gone")
    leaving(place, WorkerDrain(), engine).leave("its engine died")
    await place.ended.wait()
    assert "still run" not in caplog.text


async def test_second_reason_to_leave_is_ignored() -> None:
    place, drain = Place(), WorkerDrain()
    leaver = leaving(place, drain, recording_engine())
    leaver.leave("its engine died")
    leaver.leave("SIGTERM or SIGINT", grace_seconds=600)
    await place.ended.wait()
    assert place.done.count("shutdown") == 1
    with pytest.raises(WorkerLeavingError, match="its engine died"):
        await collect(tracked(drain, LocalAgg(recording_engine())), request())


async def test_a_worker_that_flips_leaves_as_soon_as_no_request_comes_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that comes meanwhile is answered. A quarter of ten minutes would be longer than this test may take."""
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "2")
    place, drain, loop = Place(is_first=True), WorkerDrain(), asyncio.get_running_loop()
    leaver = leaving(place, drain, recording_engine())
    leaver.flip(Role.DECODE)
    await until(lambda: place.done == ["leave", "hide"])
    assert len(await collect(tracked(drain, LocalAgg(recording_engine())), request(max_tokens=1))) == 1
    called = loop.time()
    await place.ended.wait()
    assert 0.4 < loop.time() - called < 2
    assert (leaver.flips_to, place.done[-1]) == (Role.DECODE, "shutdown")


async def test_an_order_to_stop_ends_a_flip_and_one_to_flip_ends_no_stop() -> None:
    place, drain, told_to_stop = Place(), WorkerDrain(), asyncio.Event()
    leaver = leaving(place, drain, recording_engine())
    stopping = asyncio.create_task(leaver.leave_when(told_to_stop))
    leaver.flip(Role.DECODE)
    told_to_stop.set()
    await stopping
    assert leaver.flips_to is None
    with pytest.raises(WorkerLeavingError, match="it becomes a decode worker"):
        leaver.flip(Role.PREFILL)
    assert leaver.flips_to is None


@pytest.mark.parametrize("seconds", [0.05, 600.0])
async def test_a_worker_told_to_leave_answers_when_its_requests_have_ended_or_its_time(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0")
    place, drain = Place(), WorkerDrain()
    answer = asyncio.create_task(collect(tracked(drain, relayed), request()))
    await until(lambda: drain.num_running)
    finishing = asyncio.create_task(leaving(place, drain, recording_engine(), 0.0).finish(seconds))
    if seconds > 1:
        await until(lambda: "queue drained" in place.done)
        assert not finishing.done(), "the command's time counts, not the worker's"
        answer.cancel()
    assert await finishing == (seconds < 1)
    await place.ended.wait()
    await asyncio.gather(answer, return_exceptions=True)


@pytest.mark.parametrize(
    ("place", "said"),
    [(Place, "discovery is gone"), (Hanging, "leaving discovery or the prefill queue took more than")],
)
async def test_a_worker_that_cannot_leave_discovery_ends_all_the_same(
    place: type[Place], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    here = place(broken=True, is_first=True)
    Leaving(here, WorkerDrain(), recording_engine(), here, 30.0, leave_seconds=0.05).leave("SIGTERM", 0.1)
    async with asyncio.timeout(30):
        await here.ended.wait()
    assert "frontends cannot be told that this worker leaves" in caplog.text
    assert said in caplog.text
    assert here.done[-1] == "shutdown"


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
        place, engine = Place(), engines[Role.PREFILL]
        await until(lambda: engine.handoffs.has_statistics)
        assert engine.handoffs.count() == 1
        leaving(place, WorkerDrain(), engine).leave("SIGTERM or SIGINT")
        async with asyncio.timeout(10):
            await place.ended.wait()
        assert engine.handoffs.count() == 0


async def test_leaving_worker_waits_while_statistics_show_held_kv(tensorrt_llm: ModuleType) -> None:
    async with stages() as engines:
        place, engine = Place(), engines[Role.PREFILL]
        held = await prefilled(engine)
        leaving(place, WorkerDrain(), engine).leave("SIGTERM or SIGINT")
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
    place, engine = Place(), recording_engine()
    engine.handoffs.hold()
    leaving(place, WorkerDrain(), engine, seconds=0.2).leave("SIGTERM or SIGINT")
    await place.ended.wait()
    assert engine.llm.calls_of("generate_async") == []
