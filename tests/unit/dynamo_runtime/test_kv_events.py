"""TensorRT-LLM's cache events become what the KV router understands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handling import until
from tests.support.sinks import RecordingEventSink, Removed, Stored
from trtllm_disagg.dynamo_runtime.kv_events import EventsOfRank, EventSources, KvEventForwarder, signed
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.handlers.decide import CachedPrefix

BLOCK = 4
#: Above 2**63: an unsigned number that the router's signed ones cannot hold.
BIG = 2**64 - 3


def block(block_hash: int | str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {
        "type": "stored_block",
        "block_hash": block_hash,
        "tokens": unique,
        "cache_level": 0,
        "priority": 35,
    } | fields


def stored(*blocks: dict[str, Any], parent: int | str | None = None, **event: Any) -> dict[str, Any]:
    return {"data": {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}} | event


def removed(*hashes: int | str, **event: Any) -> dict[str, Any]:
    return {"data": {"type": "removed", "block_hashes": list(hashes)}} | event


def forwarded(*events: dict[str, Any]) -> list[Stored | Removed]:
    sink = RecordingEventSink()
    KvEventForwarder(None, [EventsOfRank([sink], BLOCK) for _ in range(2)]).publish(list(events))
    return sink.events


FOUR = [1, 2, 3, 4]
#: A name of the newer cache manager, and that of a parent.
NAME, PARENT = "ff" * 32, "00" * 7 + "05" + "ab" * 24
CREATED: dict[str, Any] = {"type": "created", "num_blocks_per_cache_level": [9, 0]}
PARTIAL = stored(block(1, FOUR), block(2, [5]), block(3, [6, 7, 8, 9]))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param(
            [stored(block(1, FOUR), block(2, FOUR))],
            [Stored(FOUR * 2, [4, 4], [1, 2], None, None)],
            id="many",
        ),
        pytest.param([stored(block(2, FOUR), parent=1)], [Stored(FOUR, [4], [2], 1, None)], id="parent"),
        pytest.param(
            [stored(block(2, FOUR, cache_salt="t"))], [Stored(FOUR, [4], [2], None, "t")], id="salt"
        ),
        pytest.param(
            [stored(block(BIG, FOUR), parent=BIG - 1), removed(BIG)],
            [Stored(FOUR, [4], [-3], -4, None), Removed([-3])],
            id="signed",
        ),
        pytest.param(
            [stored(block(NAME, FOUR), parent=PARENT), removed(NAME)],
            [Stored(FOUR, [4], [-1], 5, None), Removed([-1])],
            id="names",
        ),
        pytest.param(
            [PARTIAL, removed(2), removed(3, 1)],
            [Stored(FOUR, [4], [1], None, None), Removed([1])],
            id="a partial block is left out with all that follows, and their ends",
        ),
        pytest.param(
            [stored(block(2, [5])), removed(2), stored(block(2, FOUR)), removed(2)],
            [Stored(FOUR, [4], [2], None, None), Removed([2])],
            id="the hash of a partial block becomes that of a full one",
        ),
        ([{"event_id": 0, "data": CREATED}], []),
        ([{"data": {"type": "updated", "block_hash": 1, "cache_level": {"type": "event_diff"}}}], []),
        ([{"data": {"type": "something new"}}], []),
    ],
)
def test_events_of_the_engine_become_those_of_the_router(
    events: list[dict[str, Any]], expected: list[Stored | Removed]
) -> None:
    assert forwarded(*events) == expected


def test_only_events_of_the_widest_attention_window_are_forwarded() -> None:
    """With sliding windows each block is told of once per window, under another hash."""
    events = forwarded(
        {"data": CREATED, "window_size": 128},
        {"data": CREATED, "window_size": 4096},
        stored(block(1, [1, 2, 3, 4]), window_size=128),
        stored(block(2, [1, 2, 3, 4]), window_size=4096),
        removed(1, window_size=128),
    )
    assert events == [Stored([1, 2, 3, 4], [4], [2], None, None)]


@pytest.mark.parametrize(
    ("ids", "warnings"),
    [
        ([(0, None), (1, None), (2, None)], []),
        ([(7, None), (8, None)], []),
        ([(None, None), (None, None)], []),
        ([(0, None), (3, None), (4, None)], ["KV event 3 came where 1 was due"]),
        ([(5, None), (0, None)], ["KV event 0 came where 6 was due"]),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], []),
        ([(0, 0), (0, 1), (2, 1)], ["KV event 2 came where 1 was due"]),
    ],
)
def test_gap_in_event_ids_logs_a_warning(
    ids: list[tuple[int | None, int | None]], warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    events = [removed() if event_id is None else removed(event_id=event_id) for event_id, _ in ids]
    for event, (_, rank) in zip(events, ids, strict=True):
        if rank is not None:
            event["attention_dp_rank"] = rank
    forwarded(*events)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == warnings
    assert all("event_buffer_max_size" in record.getMessage() for record in caplog.records)


def test_many_gaps_and_many_unfit_events_are_one_short_line_each(caplog: pytest.LogCaptureFixture) -> None:
    gaps = [removed(event_id=event_id) for event_id in range(0, 100, 5)]
    unfit = {"data": {"type": "stored", "blocks": list(range(1000))}}
    forwarded(*gaps, *[unfit] * 20)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == ["KV event 5 came where 1 was due", "kv-events"]
    assert "TypeError" in lines[1]
    assert len(caplog.text) < 1000


@given(st.integers(0, 2**64 - 1))
def test_signed_hash_has_the_same_64_bits(number: int) -> None:
    assert signed(number) % 2**64 == number
    assert -(2**63) <= signed(number) < 2**63


# -- beside the handlers


def llm_with(*events: dict[str, Any]) -> LLM:
    llm = LLM("m", kv_cache_config={"event_buffer_max_size": 16})
    llm.kv_cache_events = list(events)
    return llm


async def test_events_are_polled_from_start_to_stop() -> None:
    sink = RecordingEventSink()
    llm = llm_with(stored(block(1, [1, 2, 3, 4])))
    publisher = KvEventForwarder(llm, [EventsOfRank([sink], BLOCK)])
    await publisher.stop()
    await publisher.start()
    await until(lambda: sink.events)
    llm.kv_cache_events.append(removed(1))
    await until(lambda: len(sink.events) == 2)
    await publisher.stop()
    calls = len(llm.calls)
    await asyncio.sleep(0.05)
    assert len(llm.calls) == calls
    assert llm.calls_of("get_kv_cache_events_async")[0] == {"timeout": 0.0}


async def test_an_event_that_makes_no_sense_does_not_end_publishing(caplog: pytest.LogCaptureFixture) -> None:
    sink = RecordingEventSink()
    publisher = KvEventForwarder(llm_with({"data": {}}, removed(5)), [EventsOfRank([sink], BLOCK)])
    await publisher.start()
    await until(lambda: sink.events)
    await publisher.stop()
    assert sink.events == [Removed([5])]
    assert "kv-events: an event of the engine cannot be published" in caplog.text


async def test_stopping_in_the_middle_of_a_wait_takes_no_time() -> None:
    class Silent:
        async def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
            await asyncio.sleep(60)
            yield {}

    publisher = KvEventForwarder(Silent(), [EventsOfRank([RecordingEventSink()], BLOCK)])
    await publisher.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await publisher.stop()


def test_after_lost_events_nothing_is_taken_for_cached() -> None:
    index = CachedPrefix(BLOCK)
    forwarder = EventsOfRank([index], BLOCK, on_gap=lambda num_lost: index.clear())
    forwarder.forward(stored(block(1, [10, 11, 12, 13]), event_id=1))
    assert len(index) == 1
    forwarder.forward(stored(block(2, [14, 15, 16, 17]), event_id=5))
    assert index.num_cached([10, 11, 12, 13, 1]) == 0
    assert index.num_cached([14, 15, 16, 17, 1]) == BLOCK


class Renewed:
    """A source of events that discovery may drop, and all that were opened in its place."""

    def __init__(self, *, may_be_dropped: bool = True) -> None:
        self.opened: list[RecordingEventSink] = []
        self.sources = EventSources(renewable=may_be_dropped)
        self.sink = self.sources.open("frontends", self._open)

    def open_again(self) -> None:
        """As in the next role of its worker."""
        self.sink = self.sources.open("frontends", self._open)

    def _open(self) -> RecordingEventSink:
        self.opened.append(RecordingEventSink())
        return self.opened[-1]


@pytest.mark.parametrize(
    "renew", [lambda r: r.sources.renew(), Renewed.open_again], ids=["renewed", "opened"]
)
def test_a_source_that_enters_again_repeats_the_blocks_that_are_stored(
    renew: Callable[[Renewed], None],
) -> None:
    renewed = Renewed()
    renewed.sink.publish_stored(list(range(8)), [4, 4], [1, 2], 7, cache_salt="tenant-1")
    renewed.sink.publish_stored([9, 9, 9, 9], [4], [7])
    renewed.sink.publish_stored([8, 8, 8, 8], [4], [3])
    renewed.sink.publish_removed([3])

    renew(renewed)

    assert [each.is_shut_down for each in renewed.opened] == [True, False]
    assert renewed.opened[-1].events == [
        Stored([9, 9, 9, 9], [4], [7], None, None),
        Stored([0, 1, 2, 3], [4], [1], 7, "tenant-1"),
        Stored([4, 5, 6, 7], [4], [2], 1, "tenant-1"),
    ]


def test_a_renewed_source_leaves_out_blocks_whose_parent_was_removed_and_gets_what_comes_later() -> None:
    renewed = Renewed()
    renewed.sink.publish_stored(list(range(8)), [4, 4], [1, 2])
    renewed.sink.publish_removed([1])
    renewed.sources.renew()
    renewed.sink.publish_removed([5])
    assert [len(each.events) for each in renewed.opened] == [2, 1]
    assert renewed.opened[-1].events == [Removed([5])]


def test_a_source_stays_as_it_is_where_discovery_drops_none() -> None:
    renewed = Renewed(may_be_dropped=False)
    renewed.sources.renew()
    assert renewed.opened == [renewed.sink]


def test_the_listeners_of_a_later_role_begin_with_the_cache_as_it_is() -> None:
    renewed, later = Renewed(), RecordingEventSink()
    first = renewed.sources.continued(0, EventsOfRank([renewed.sink], BLOCK))
    first.forward(stored(block(1, [0, 1, 2, 3]), block(2, [4, 5])))
    sink = renewed.sources.open("frontends", lambda: later)
    second = renewed.sources.continued(0, EventsOfRank([sink], BLOCK))
    # Of the block that was no full one no router was told.
    second.forward(removed(2))
    second.forward(removed(1))
    assert later.events == [Stored([0, 1, 2, 3], [4], [1], None, None), Removed([1])]
    assert renewed.opened[0].is_shut_down
