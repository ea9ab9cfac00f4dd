"""A worker that discovery may have forgotten: it was frozen for long, or nothing could be written for long."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
from dynamo.runtime import Context

from tests.support.deployments import demo_model
from tests.support.handling import raw_request, until
from tests.support.listed import MODEL, Listed, serving
from tests.support.sinks import RecordingEventSink
from tests.unit.worker.test_stage_state import stage_state
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.discovery import DiscoveryFiles
from trtllm_disagg.dynamo_runtime.listing import keep_in_discovery
from trtllm_disagg.dynamo_runtime.metrics import DynamoMetrics
from trtllm_disagg.dynamo_runtime.publishers import KvEventForwarder
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk
from trtllm_disagg.worker.life import Event


class Clock:
    """Half a second from look to look; `gap` more in the next sleep, which is before each second look."""

    def __init__(self) -> None:
        self.now = 0.0
        self.gap = 0.0
        self._sleeps = itertools.cycle([False, True])

    def __call__(self) -> float:
        self.now += 0.5
        if next(self._sleeps):
            self.now += self.gap
            self.gap = 0.0
        return self.now


async def nothing() -> None:
    pass


async def test_each_freeze_is_reported_once_and_a_short_delay_is_none() -> None:
    thaws: list[float] = []
    clock = Clock()

    async def thaw() -> None:
        thaws.append(clock.now)

    watcher = asyncio.create_task(keep_in_discovery(thaw, nothing, clock, poll_seconds=0.0))
    for gap, count in ((3.0, 0), (20.0, 1), (20.0, 2)):
        clock.gap = gap
        await until(lambda: len(thaws) == count)  # noqa: B023
        seen = clock.now
        await until(lambda: clock.now > seen + 10)  # noqa: B023
        assert len(thaws) == count
    watcher.cancel()


def remove_files(directory: Path) -> None:
    for each in directory.rglob("*"):
        if each.is_file():
            each.unlink()


def files_of_endpoints(directory: Path) -> list[Path]:
    """Where requests or routers look for them; an event channel is told of tokens, and ends with its process."""
    return [
        path
        for path in directory.rglob("*")
        if path.is_file() and "generate" in str(path) and "event_channels" not in path.parts
    ]


async def no_tokens(*_: object) -> AsyncIterator[None]:
    yield


@pytest.fixture
async def decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listed]:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    config = WorkerConfig(model="m", role=Role.DECODE, strategy="prefill_first")
    async with serving(config, no_tokens) as (worker, _):  # type: ignore[arg-type]
        yield worker


async def listing(worker: Listed) -> Callable[[bool], Awaitable[None]]:
    """Waits until a client of discovery sees the worker, or sees it no more."""
    seen = await worker.runtime.stage("dyn://dynamo.backend.generate")

    async def wait(is_there: bool) -> None:
        await until(lambda: seen.instance_ids() == [worker.instance_id] * is_there)

    return wait


async def test_a_worker_returns_to_discovery_after_another_process_has_removed_its_files(
    decode: Listed, tmp_path: Path
) -> None:
    """With Dynamo's own file discovery; nothing could be written there for a while, for example."""
    registration = decode.registration

    async def return_if_lost() -> None:
        if await registration.is_lost():
            await registration.renew()

    listed = await listing(decode)
    await listed(True)
    assert not await registration.is_lost()
    await asyncio.to_thread(remove_files, tmp_path)
    await listed(False)
    watcher = asyncio.create_task(keep_in_discovery(nothing, return_if_lost, poll_seconds=0.01))
    await listed(True)
    while await registration.is_lost():  # noqa: ASYNC110  # the entry is seen before the renewal ends
        await asyncio.sleep(0.01)
    watcher.cancel()
    await decode.registration.unlist()
    await listed(False)
    assert not await registration.is_lost()


async def test_a_renewal_that_fails_halfway_is_tried_again(decode: Listed) -> None:
    """The instance is back by then, but nothing that comes after it."""
    failures = iter([None, OSError("read-only file system"), None])

    def open_source() -> RecordingEventSink:
        if failure := next(failures):
            raise failure
        return RecordingEventSink()

    registration = decode.registration
    metrics = DynamoMetrics(WorkerConfig(model="m"), MODEL.num_blocks)
    await KvEventForwarder(decode.readers.events, {0: [open_source]}, metrics).start()
    with pytest.raises(OSError, match="read-only"):
        await registration.renew()
    assert await registration.is_lost()
    await registration.renew()
    assert not await registration.is_lost()


async def test_only_a_lost_worker_enters_discovery_again() -> None:
    worker, registration, _ = stage_state("decode", "decode_first")
    await worker.apply("decode_first")
    await worker.stage.renew(only_if_lost=True)
    assert [word for word, _ in registration.history] == ["enter"]
    registration.has_been_dropped = True
    await worker.stage.renew(only_if_lost=True)
    assert [word for word, _ in registration.history] == ["enter", "renew"]
    assert registration.is_at_frontends
    worker.life.happened(Event.STOP)
    await worker.stage.renew()
    assert registration.history[-1][0] == "renew" != registration.history[-2][0], "it leaves"


@pytest.mark.parametrize("gap", [0.0, 20.0])
async def test_entering_again_is_tried_again_when_it_fails(
    gap: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock, attempts = Clock(), []
    clock.gap = gap

    async def fails() -> None:
        attempts.append(1)
        raise OSError("read-only file system")

    after_freeze, after_loss = (fails, nothing) if gap else (nothing, fails)
    keeping = keep_in_discovery(after_freeze, after_loss, clock, poll_seconds=0.0, retry_seconds=0.0)
    watcher = asyncio.create_task(keeping)
    await until(lambda: len(attempts) > 1)
    watcher.cancel()
    assert "read-only file system; trying again" in caplog.text


def test_a_file_is_lost_only_if_it_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    files, endpoint = DiscoveryFiles(0xAB), ["dyn://ns.my_backend.generate"]
    assert not files.has_lost(endpoint)
    directory = tmp_path / "v1" / "instances"
    directory.mkdir(parents=True)
    assert not files.has_lost(endpoint)
    entry = directory / "ns%2Fmy%5Fbackend%2Fgenerate%2Fab"
    entry.touch()
    assert not files.has_lost(endpoint)
    entry.unlink()
    assert files.has_lost(endpoint)
    assert not files.has_lost([])
    assert not files.has_lost(endpoint), "it left in between, so the file is to come"


async def test_a_worker_that_has_left_does_not_come_back(decode: Listed, tmp_path: Path) -> None:
    """Frozen while it leaves, it would be told that it was forgotten."""
    listed = await listing(decode)
    await listed(True)
    await decode.registration.unlist()
    await listed(False)
    await decode.registration.listing.renew()
    await decode.registration.enter()
    await decode.cards.put_for_peers()
    assert await asyncio.to_thread(files_of_endpoints, tmp_path) == []


async def test_serving_ends_with_the_last_endpoint_and_not_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker comes to the frontends' endpoint later than to its role's, and relays there."""
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    go_on = asyncio.Event()

    async def relay(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk([1])
        await go_on.wait()
        yield TokenChunk([2], finish_reason="stop")

    # A directory that is no model: there will be no card of it, and the endpoint is served before that is known.
    config = WorkerConfig(model=str(tmp_path), role=Role.PREFILL, strategy="prefill_first")
    async with serving(config, relay) as (worker, task):
        runtime = worker.runtime
        peer = await runtime.stage("dyn://dynamo.prefill.generate")
        await until(lambda: peer.instance_ids() == [runtime.instance_id])
        with contextlib.suppress(Exception):
            await worker.registration.enter()
        front = await runtime.stage("dyn://dynamo.tensorrt_llm.generate")
        await until(lambda: front.instance_ids() == [runtime.instance_id])
        answers = front.instance(runtime.instance_id).call(raw_request(), Context())
        seen = [(await anext(answers))["token_ids"]]
        runtime.shutdown()
        await asyncio.wait([task], timeout=0.5)
        assert not task.done()
        go_on.set()
        seen += [answer["token_ids"] async for answer in answers]
    assert seen == [[1], [2]]


# -- a worker that leaves frontends


async def test_a_first_stage_leaves_frontends_before_discovery_and_the_last_one_closes_its_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frontend drops a request that it just sends to a worker which leaves discovery, and has no other one for a
    request that it has begun to route where the last worker is gone.
    """
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    config = WorkerConfig(model=str(demo_model()), role=Role.AGG)
    async with serving(config, no_tokens) as (one, _), serving(config, no_tokens) as (other, _):  # type: ignore[arg-type]
        assert not await one.registration.stop_frontends(closes_namespace=False), "no frontend knows it yet"
        for each in (one, other):
            await each.registration.enter()
        assert cards(tmp_path) == {one.instance_id: ["generate"], other.instance_id: ["generate"]}
        seen, left = [await each.runtime.stage(config.frontend_endpoint_id) for each in (one, other)]
        await until(lambda: len(seen.instance_ids()) == 2)
        assert await one.registration.stop_frontends(closes_namespace=False)
        assert cards(tmp_path) == {other.instance_id: ["generate"]}
        await one.registration.unlist()
        await until(lambda: left.instance_ids() == [other.instance_id])
        assert await other.registration.stop_frontends(closes_namespace=False)
        assert cards(tmp_path) == {other.instance_id: ["generate", "generate_closed"]}
        await other.registration.unlist()
        await other.cards.open_namespace()
        assert cards(tmp_path) == {other.instance_id: ["generate"]}


async def test_a_worker_that_completes_a_pair_for_the_frontend_keeps_its_namespace_closed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the frontend has made its routers, it refuses requests for it."""
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    config = WorkerConfig(model=str(demo_model()), role=Role.PREFILL, strategy="router")
    async with serving(config, no_tokens) as (prefill, _):  # type: ignore[arg-type]
        entering = asyncio.create_task(prefill.registration.enter())
        for names in (["generate_closed"], ["generate", "generate_closed"], ["generate"]):
            await until(lambda: cards(tmp_path) == {prefill.instance_id: names})  # noqa: B023
        await entering


def cards(directory: Path) -> dict[int, list[str]]:
    """Instance id -> the names of the endpoints at which it has a card, sorted."""
    found: dict[int, list[str]] = {}
    for path in sorted((directory / "v1" / "mdc").glob("*")):
        *_, endpoint, instance = unquote(path.name).split("/")
        found.setdefault(int(instance, 16), []).append(endpoint)
    return found
