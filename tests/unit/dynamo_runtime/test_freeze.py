"""A worker that discovery may have forgotten: it was frozen for long, or nothing could be written for long."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest
from dynamo.runtime import Context

from tests.support.handling import raw_request, until
from tests.support.sinks import RecordingEventSink
from tests.unit.worker.test_stage_state import stage_state
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.discovery_files import DiscoveryFiles
from trtllm_disagg.dynamo_runtime.handler import refuse_control
from trtllm_disagg.dynamo_runtime.kv_events import EventSources
from trtllm_disagg.dynamo_runtime.shutdown import watch_for_freezes, watch_for_loss
from trtllm_disagg.dynamo_runtime.worker_endpoint import DynamoRegistration, Runtime, ServedModel
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


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


@contextlib.asynccontextmanager
async def watching(thaws: list[float], clock: Clock, error: Exception | None = None) -> AsyncIterator[None]:
    async def thaw() -> None:
        thaws.append(clock.now)
        if error is not None:
            raise error

    watcher = asyncio.create_task(watch_for_freezes(thaw, clock, poll_seconds=0.0))
    try:
        yield
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def test_freeze_is_reported_once() -> None:
    thaws: list[float] = []
    clock = Clock()
    async with watching(thaws, clock):
        for count in (1, 2):
            clock.gap = 20.0
            await until(lambda: len(thaws) == count)  # noqa: B023
            seen = clock.now
            await until(lambda: clock.now > seen + 10)  # noqa: B023
            assert len(thaws) == count


async def test_delay_of_3_seconds_is_not_reported_as_a_freeze() -> None:
    thaws: list[float] = []
    clock = Clock()
    async with watching(thaws, clock):
        clock.gap = 3.0
        await until(lambda: clock.now > 20)
    assert not thaws


async def test_freeze_watch_continues_when_registering_again_fails(caplog: pytest.LogCaptureFixture) -> None:
    thaws: list[float] = []
    clock = Clock()
    async with watching(thaws, clock, OSError("no directory")):
        for count in (1, 2):
            clock.gap = 20.0
            await until(lambda: len(thaws) == count)  # noqa: B023
    assert "restart it" in caplog.text


async def test_renew_registers_only_what_was_registered() -> None:
    worker, registration, _ = stage_state("decode", "decode_first")
    await worker.apply("decode_first")
    await worker.renew()
    assert [word for word, _ in registration.history] == ["enter", "renew"]
    assert registration.is_at_frontends


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


def no_events() -> EventSources:
    return EventSources(may_be_dropped=True)


async def no_tokens(*_: object) -> AsyncIterator[None]:
    yield


async def test_a_forgotten_worker_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Dynamo's own file discovery, after another process has removed its files."""
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    runtime = Runtime(WorkerConfig(model="m", role=Role.DECODE, strategy="prefill_first"))
    registration = DynamoRegistration(runtime, ServedModel(16, 8, 1, 64, 64), no_events(), tells_peers=False)
    serving = asyncio.create_task(runtime.serve(_unused, dict, refuse_control))
    seen = await runtime.stage("dyn://dynamo.backend.generate")
    try:
        await until(lambda: seen.instance_ids() == [runtime.instance_id])
        await asyncio.to_thread(remove_files, tmp_path)
        await until(lambda: seen.instance_ids() == [])
        await registration.renew()
        await until(lambda: seen.instance_ids() == [runtime.instance_id])
    finally:
        runtime.shutdown()
        await serving


async def test_a_worker_returns_to_discovery_after_another_process_has_removed_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not frozen: for a while nothing could be written there, for example."""
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    runtime = Runtime(WorkerConfig(model="m", role=Role.DECODE, strategy="prefill_first"))
    registration = DynamoRegistration(runtime, ServedModel(16, 8, 1, 64, 64), no_events(), tells_peers=False)

    async def return_if_lost() -> None:
        if await registration.is_lost():
            await registration.renew()

    serving = asyncio.create_task(runtime.serve(_unused, dict, refuse_control))
    seen = await runtime.stage("dyn://dynamo.backend.generate")
    try:
        await until(lambda: seen.instance_ids() == [runtime.instance_id])
        assert not await registration.is_lost()
        await asyncio.to_thread(remove_files, tmp_path)
        await until(lambda: seen.instance_ids() == [])
        watcher = asyncio.create_task(watch_for_loss(return_if_lost, poll_seconds=0.01))
        await until(lambda: seen.instance_ids() == [runtime.instance_id])
        watcher.cancel()
        await runtime.leave()
        await until(lambda: seen.instance_ids() == [])
        assert not await registration.is_lost()
    finally:
        runtime.shutdown()
        await serving


async def test_a_renewal_that_fails_on_its_way_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance is back by then, but nothing that comes after it."""
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    runtime = Runtime(WorkerConfig(model="m", role=Role.DECODE, strategy="prefill_first"))
    failures = iter([None, OSError("read-only file system"), None])

    def open_source() -> RecordingEventSink:
        if failure := next(failures):
            raise failure
        return RecordingEventSink()

    sources = no_events()
    sources.open(open_source)
    registration = DynamoRegistration(runtime, ServedModel(16, 8, 1, 64, 64), sources, tells_peers=False)
    serving = asyncio.create_task(runtime.serve(_unused, dict, refuse_control))
    try:
        with pytest.raises(OSError, match="read-only"):
            await registration.renew()
        assert await registration.is_lost()
        await registration.renew()
        assert not await registration.is_lost()
    finally:
        runtime.shutdown()
        await serving


async def test_a_worker_that_is_not_lost_does_not_enter_discovery_again() -> None:
    worker, registration, _ = stage_state("decode", "decode_first")
    await worker.apply("decode_first")
    await worker.return_if_lost()
    assert [word for word, _ in registration.history] == ["enter"]
    registration.has_been_dropped = True
    await worker.return_if_lost()
    assert [word for word, _ in registration.history] == ["enter", "renew"]


async def test_loss_watch_tries_again_when_registering_again_fails(caplog: pytest.LogCaptureFixture) -> None:
    attempts = []

    async def fails() -> None:
        attempts.append(1)
        raise OSError("read-only file system")

    watcher = asyncio.create_task(watch_for_loss(fails, poll_seconds=0.0, retry_seconds=0.0))
    await until(lambda: len(attempts) > 1)
    watcher.cancel()
    assert "read-only file system; the next attempt" in caplog.text


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


async def test_a_worker_that_has_left_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen while it leaves, it would be told that it was forgotten."""
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    runtime = Runtime(WorkerConfig(model="m", role=Role.DECODE, strategy="prefill_first"))
    serving = asyncio.create_task(runtime.serve(_unused, dict, refuse_control))
    seen = await runtime.stage("dyn://dynamo.backend.generate")
    try:
        await until(lambda: seen.instance_ids() == [runtime.instance_id])
        await runtime.leave()
        await until(lambda: seen.instance_ids() == [])
        await runtime.list_again()
        model = ServedModel(16, 8, 1, 64, 64)
        await runtime.register(model)
        await runtime.register_for_peers(model)
        assert await asyncio.to_thread(files_of_endpoints, tmp_path) == []
    finally:
        runtime.shutdown()
        await serving


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
    runtime = Runtime(config)
    serving = asyncio.create_task(runtime.serve(relay, dict, refuse_control))
    peer = await runtime.stage("dyn://dynamo.prefill.generate")
    await until(lambda: peer.instance_ids() == [runtime.instance_id])
    with contextlib.suppress(Exception):
        await runtime.register(ServedModel(16, 8, 1, 64, 64))
    front = await runtime.stage("dyn://dynamo.tensorrt_llm.generate")
    await until(lambda: front.instance_ids() == [runtime.instance_id])
    answers = front.instance(runtime.instance_id).call(raw_request(), Context())
    seen = [(await anext(answers))["token_ids"]]
    runtime.shutdown()
    await asyncio.wait([serving], timeout=0.5)
    assert not serving.done()
    go_on.set()
    seen += [answer["token_ids"] async for answer in answers]
    await serving
    assert seen == [[1], [2]]


_unused: Generate = no_tokens  # type: ignore[assignment]
