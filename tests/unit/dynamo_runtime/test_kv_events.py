"""TensorRT-LLM's cache events become what the KV router understands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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


def test_whole_blocks_are_stored_together() -> None:
    event = stored(block(1, [10, 11, 12, 13]), block(2, [14, 15, 16, 17]))
    assert forwarded(event) == [Stored(list(range(10, 18)), [4, 4], [1, 2], None, None)]


def test_stored_event_keeps_the_parent_hash() -> None:
    (event,) = forwarded(stored(block(2, [1, 2, 3, 4]), parent=1))
    assert isinstance(event, Stored)
    assert event.parent_hash == 1


def test_stored_event_keeps_the_cache_salt() -> None:
    (event,) = forwarded(stored(block(2, [1, 2, 3, 4], cache_salt="tenant-1")))
    assert isinstance(event, Stored)
    assert event.cache_salt == "tenant-1"


def test_hashes_are_signed_everywhere() -> None:
    events = forwarded(stored(block(BIG, [1, 2, 3, 4]), parent=BIG - 1), removed(BIG))
    assert events == [Stored([1, 2, 3, 4], [4], [-3], -4, None), Removed([-3])]


def test_hashes_of_the_newer_cache_manager_are_texts() -> None:
    name, parent = "ff" * 32, "00" * 7 + "05" + "ab" * 24
    events = forwarded(stored(block(name, [1, 2, 3, 4]), parent=parent), removed(name))
    assert events == [Stored([1, 2, 3, 4], [4], [-1], 5, None), Removed([-1])]


def test_a_part_of_a_block_is_left_out_with_all_that_follows() -> None:
    event = stored(block(1, [1, 2, 3, 4]), block(2, [5]), block(3, [6, 7, 8, 9]))
    assert forwarded(event) == [Stored([1, 2, 3, 4], [4], [1], None, None)]
    assert forwarded(stored(block(2, [5]))) == []


def test_the_end_of_what_was_left_out_is_left_out() -> None:
    first = stored(block(1, [1, 2, 3, 4]), block(2, [5]), block(3, [6, 7, 8, 9]))
    assert forwarded(first, removed(2), removed(3, 1))[1:] == [Removed([1])]


def test_hash_of_a_skipped_partial_block_can_be_stored_as_a_full_block() -> None:
    events = forwarded(stored(block(2, [5])), removed(2), stored(block(2, [5, 6, 7, 8])), removed(2))
    assert events == [Stored([5, 6, 7, 8], [4], [2], None, None), Removed([2])]


@pytest.mark.parametrize(
    "data",
    [
        {"type": "created", "num_blocks_per_cache_level": [9, 0]},
        {"type": "updated", "block_hash": 1, "cache_level": {"type": "event_diff"}},
        {"type": "something new"},
    ],
)
def test_other_events_are_not_forwarded(data: dict[str, Any]) -> None:
    assert forwarded({"event_id": 0, "data": data}) == []


def test_only_events_of_the_widest_attention_window_are_forwarded() -> None:
    """With sliding windows each block is told of once per window, under another hash."""
    created: dict[str, Any] = {"type": "created", "num_blocks_per_cache_level": [9]}
    events = forwarded(
        {"data": created, "window_size": 128},
        {"data": created, "window_size": 4096},
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
        ([(0, None), (3, None), (4, None)], ["KV event 3 came where 1 was due"]),
        ([(5, None), (0, None)], ["KV event 0 came where 6 was due"]),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], []),
        ([(0, 0), (0, 1), (2, 1)], ["KV event 2 came where 1 was due"]),
    ],
)
def test_gap_in_event_ids_logs_a_warning(
    ids: list[tuple[int, int | None]], warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    events = [removed(event_id=event_id) for event_id, _ in ids]
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


def test_events_without_ids_have_no_gaps(caplog: pytest.LogCaptureFixture) -> None:
    forwarded(removed(1), removed(2))
    assert caplog.records == []


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


async def test_an_event_that_makes_no_sense_does_not_end_publishing(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
        self.sources = EventSources(may_be_dropped=may_be_dropped)
        self.sink = self.sources.open(self._open)

    def _open(self) -> RecordingEventSink:
        self.opened.append(RecordingEventSink())
        return self.opened[-1]

    def told(self) -> list[Stored | Removed]:
        return self.opened[-1].events


def test_a_renewed_source_repeats_the_blocks_that_are_stored() -> None:
    renewed = Renewed()
    renewed.sink.publish_stored(list(range(8)), [4, 4], [1, 2], 7, cache_salt="tenant-1")
    renewed.sink.publish_stored([9, 9, 9, 9], [4], [7])
    renewed.sink.publish_stored([8, 8, 8, 8], [4], [3])
    renewed.sink.publish_removed([3])

    renewed.sources.renew()

    assert [each.is_shut_down for each in renewed.opened] == [True, False]
    assert renewed.told() == [
        Stored([9, 9, 9, 9], [4], [7], None, None),
        Stored([0, 1, 2, 3], [4], [1], 7, "tenant-1"),
        Stored([4, 5, 6, 7], [4], [2], 1, "tenant-1"),
    ]


def test_a_renewed_source_leaves_out_blocks_whose_parent_was_removed() -> None:
    renewed = Renewed()
    renewed.sink.publish_stored(list(range(8)), [4, 4], [1, 2])
    renewed.sink.publish_removed([1])
    renewed.sources.renew()
    assert renewed.told() == []


def test_events_after_a_renewal_reach_the_new_source_only() -> None:
    renewed = Renewed()
    renewed.sources.renew()
    renewed.sink.publish_stored([1, 2, 3, 4], [4], [5])
    renewed.sink.publish_removed([5])
    assert [each.events for each in renewed.opened] == [
        [],
        [Stored([1, 2, 3, 4], [4], [5], None, None), Removed([5])],
    ]


def test_a_source_stays_as_it_is_where_discovery_drops_none() -> None:
    renewed = Renewed(may_be_dropped=False)
    renewed.sources.renew()
    assert renewed.opened == [renewed.sink]
