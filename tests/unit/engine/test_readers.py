"""An engine has one reader of its statistics and one of its events for life; role terms come and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.day_one import opened
from tests.support.handling import until
from tests.support.recording_pair import recording_engine
from tests.support.sinks import RecordingCacheListener, RecordingStatsSink
from tests.unit.engine.test_cache_events import block, removed, stored
from trtllm_disagg.engine.readers import (
    EVENTS_TIMEOUT,
    STATS_TIMEOUT,
    EngineReaders,
    Reader,
    Records,
    Statistics,
)

WITH_NEWS: dict[str, Any] = {
    "enable_iter_perf_stats": True,
    "kv_cache_config": {"event_buffer_max_size": 64, "tokens_per_block": 4},
}


class Term(RecordingStatsSink):
    """What a role term hears of statistics."""

    def polled(self, records: Records) -> None:
        for stat in records:
            self.update(stat)


def poll_of(poll: Callable[[], Any]) -> Reader:
    return Reader("engine-stats", poll, lambda found: None)


async def test_all_statistics_and_events_of_every_role_term_arrive(tensorrt_llm: ModuleType) -> None:
    """Also what comes between two terms; TensorRT-LLM's iterators would end with the first one."""
    engine = opened(**WITH_NEWS)
    event_ids = iter(range(10_000))

    def make(count: int) -> None:
        for event_id in (next(event_ids) for _ in range(count)):
            engine.llm.kv_cache_events.append(stored(block(event_id, [event_id] * 4), event_id=event_id))
            engine.llm.stats.append({"iter": event_id, "kvCacheStats": {"usedNumBlocks": 0}})

    async with EngineReaders(engine, 4, reads_statistics=True) as readers:
        for number in range(4):
            stats, cache = Term(), RecordingCacheListener()
            readers.statistics.subscribe(stats)
            readers.events.subscribe(cache)
            assert len(cache.events) == number * 25
            make(20)
            await until(lambda: len(stats.stats) >= 20)  # noqa: B023  # this one is awaited here
            await until(lambda: len(cache.events) >= number * 25 + 20)  # noqa: B023
            readers.statistics.unsubscribe(stats)
            readers.events.unsubscribe(cache)
            make(5)
            await until(lambda: not engine.llm.stats and not engine.llm.kv_cache_events)
            assert [stat["iter"] for stat in stats.stats] == list(range(number * 25, number * 25 + 20))
            assert len(cache.events) == number * 25 + 20
            assert cache.num_lost == 0
        assert engine.handoffs.has_statistics


async def test_a_blocking_call_runs_in_its_own_thread_and_delays_neither_the_loop_nor_the_other_reader() -> (
    None
):
    engine = recording_engine(**WITH_NEWS)
    release, threads, heard = threading.Event(), set[int](), RecordingCacheListener()

    def blocked(timeout: float) -> list[dict[str, Any]]:
        threads.add(threading.get_ident())
        release.wait()
        return []

    engine.llm.get_stats = blocked
    async with EngineReaders(engine, 4, reads_statistics=True) as readers:
        await until(lambda: threads)
        readers.events.subscribe(heard)
        term = Term()
        readers.statistics.subscribe(term)
        readers.statistics.unsubscribe(term)
        engine.llm.kv_cache_events.append(removed(1))
        await until(lambda: heard.events)
        release.set()
    assert threading.get_ident() not in threads


async def test_the_engine_is_asked_with_short_timeouts_and_only_until_the_end() -> None:
    engine = recording_engine(**WITH_NEWS)
    async with EngineReaders(engine, 4, reads_statistics=True):
        await until(lambda: engine.llm.calls_of("get_stats") and engine.llm.calls_of("get_kv_cache_events"))
    calls = len(engine.llm.calls)
    await asyncio.sleep(0.05)
    assert len(engine.llm.calls) == calls
    assert engine.llm.calls_of("get_stats")[0] == {"timeout": STATS_TIMEOUT}
    assert engine.llm.calls_of("get_kv_cache_events")[0] == {"timeout": EVENTS_TIMEOUT}
    assert STATS_TIMEOUT <= 0.01


async def test_an_engine_without_statistics_and_events_is_not_asked_for_them() -> None:
    engine = recording_engine()
    async with EngineReaders(engine, 4, reads_statistics=False):
        assert not [each for each in threading.enumerate() if each.name in ("engine-stats", "kv-events")]


async def test_polls_of_an_engine_without_news_become_rarer() -> None:
    asked: list[float] = []
    reader = poll_of(lambda: asked.append(time.monotonic()) or [])  # type: ignore[func-returns-value]
    reader.start()
    await until(lambda: len(asked) >= 6)
    await reader.stop()
    assert asked[5] - asked[4] >= 0.09


async def test_a_poll_that_fails_is_logged_and_the_next_one_comes_a_second_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TensorRT-LLM without enable_iter_perf_stats, say."""
    asked: list[float] = []

    def failing() -> Sequence[Any]:
        asked.append(time.monotonic())
        raise RuntimeError("iteration statistics need enable_iter_perf_stats")

    reader = poll_of(failing)
    reader.start()
    await until(lambda: len(asked) == 2)
    await reader.stop()
    assert asked[1] - asked[0] >= 1.0
    assert "engine-stats: reading failed: RuntimeError: iteration statistics need" in caplog.text


async def test_a_reader_that_never_answers_does_not_keep_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    release, entered = threading.Event(), threading.Event()

    def wedged() -> Sequence[Any]:
        entered.set()
        release.wait()
        return []

    reader = poll_of(wedged)
    reader.stop_seconds = 0.05
    reader.start()
    await until(entered.is_set)
    await reader.stop()
    assert "engine-stats: the engine does not answer" in caplog.text
    release.set()


def test_a_listener_that_fails_keeps_no_statistics_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Term):
        def update(self, stat: Any) -> None:
            raise OSError("the socket is closed")

    term = Term()
    statistics = Statistics(Broken())
    statistics.subscribe(Broken())
    statistics.subscribe(term)
    statistics.receive([{"iter": 1}, {"iter": 2}])
    assert [stat["iter"] for stat in term.stats] == [1, 2]
    assert "engine-stats: publishing failed: OSError" in caplog.text


@given(st.lists(st.one_of(st.integers(0, 4), st.sampled_from(["subscribe", "unsubscribe"])), max_size=40))
def test_each_statistic_reaches_the_term_it_came_in_once_and_the_engine_always(
    steps: list[int | str],
) -> None:
    always, terms = RecordingStatsSink(), [Term()]
    expected: list[list[int]] = [[]]
    statistics, is_subscribed, made = Statistics(always), False, 0
    for step in steps:
        if step == "subscribe" and not is_subscribed:
            terms.append(Term())
            expected.append([])
            statistics.subscribe(terms[-1])
            is_subscribed = True
        elif step == "unsubscribe":
            statistics.unsubscribe(terms[-1])
            is_subscribed = False
        elif isinstance(step, int):
            new = range(made, made := made + step)
            statistics.receive([{"iter": number} for number in new])
            expected[-1] += new if is_subscribed else ()
    assert [[stat["iter"] for stat in term.stats] for term in terms] == expected
    assert [stat["iter"] for stat in always.stats] == list(range(made))
