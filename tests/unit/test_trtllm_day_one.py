"""What TensorRT-LLM really does on the first day, where it is harder to live with than its API looks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.handling import until
from tests.support.loop_lag import loop_never_stands_still
from trtllm_disagg.dynamo_runtime.polling import PollingPublisher
from trtllm_disagg.dynamo_runtime.publishers import KvEventForwarder, StatsForwarder
from trtllm_disagg.testing.sinks import RecordingEventSink, RecordingLoadSink, RecordingStatsSink


@pytest.fixture(autouse=True)
async def the_loop_goes_on() -> AsyncIterator[None]:
    """In every test here."""
    async with loop_never_stands_still():
        yield


# -- statistics and cache events: the readers block


class BlockingReaders:
    """As TensorRT-LLM's proxy asks its engine: by a blocking call, before there is an iterator."""

    def __init__(self, least_seconds: float = 0.0) -> None:
        self.threads: set[int] = set()
        self.timeouts: set[float] = set()
        self._least_seconds = least_seconds
        self.records: list[dict[str, Any]] = []

    def get_stats_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.timeouts.add(timeout)
        if not self.records:
            time.sleep(max(timeout, self._least_seconds))
        return self._found()

    get_kv_cache_events_async = get_stats_async

    async def _found(self) -> AsyncIterator[dict[str, Any]]:
        while self.records:
            yield self.records.pop(0)


def publishers_of(llm: Any) -> list[PollingPublisher]:
    load, stats = RecordingLoadSink(), RecordingStatsSink()
    return [StatsForwarder(llm, load, stats), KvEventForwarder(llm, [RecordingEventSink()], 4)]


@pytest.mark.parametrize("which", [0, 1], ids=["statistics", "cache-events"])
async def test_a_reader_that_blocks_blocks_no_request(which: int) -> None:
    llm = BlockingReaders(least_seconds=0.3)
    publisher = publishers_of(llm)[which]
    await publisher.start()
    await until(lambda: llm.threads)
    await asyncio.sleep(0.1)
    await publisher.stop()
    assert threading.get_ident() not in llm.threads
    assert max(llm.timeouts) <= 0.01


async def test_an_engine_with_no_news_is_asked_less_and_less_often() -> None:
    publisher = StatsForwarder(BlockingReaders(), RecordingLoadSink(), RecordingStatsSink())
    asked: list[float] = []
    publisher.records = lambda: asked.append(time.monotonic()) or _nothing()  # type: ignore[method-assign, func-returns-value]
    await publisher.start()
    await until(lambda: len(asked) >= 6)
    await publisher.stop()
    assert asked[5] - asked[4] >= 0.09


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    nothing: tuple[dict[str, Any], ...] = ()
    for record in nothing:
        yield record


async def test_an_iterator_that_never_ends_still_lets_its_reader_publish() -> None:
    load = RecordingLoadSink()
    publisher = StatsForwarder(BlockingReaders(), load, RecordingStatsSink())

    async def endless() -> AsyncIterator[dict[str, Any]]:
        while True:
            yield {"kvCacheStats": {"usedNumBlocks": 3}}

    publisher.records = endless  # type: ignore[method-assign]
    assert await publisher.poll()
    assert load.loads == [(None, 3)]


@pytest.mark.parametrize("nothing", [TimeoutError, asyncio.QueueEmpty])
async def test_an_iterator_that_ends_by_its_timeout_has_nothing(nothing: type[Exception]) -> None:
    publisher = StatsForwarder(BlockingReaders(), RecordingLoadSink(), RecordingStatsSink())

    async def late() -> AsyncIterator[dict[str, Any]]:
        yield {}
        raise nothing

    publisher.records = late  # type: ignore[method-assign]
    assert await publisher.poll()


async def test_a_reader_that_never_answers_does_not_keep_the_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtllm_disagg.dynamo_runtime.polling._STOP_SECONDS", 0.05)
    release = threading.Event()
    publisher = StatsForwarder(BlockingReaders(), RecordingLoadSink(), RecordingStatsSink())
    entered = threading.Event()

    def wedged() -> AsyncIterator[dict[str, Any]]:
        entered.set()
        release.wait()
        return _nothing()

    publisher.records = wedged  # type: ignore[method-assign]
    await publisher.start()
    await until(entered.is_set)
    await publisher.stop()
    assert "engine-stats: the engine does not answer" in caplog.text
    release.set()
