"""TensorRT-LLM's cache events become what the KV router understands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sinks import IndexListener, RecordingCacheListener, Removed, Stored, events_for
from trtllm_disagg.engine.cache_events import CacheEvents, StoredBlocks, signed
from trtllm_disagg.handlers.cached_prefix import CachedPrefix

BLOCK = 4
#: Above 2**63: an unsigned number that the router's signed ones cannot hold.
BIG = 2**64 - 3


def block(block_hash: int | str, tokens: Sequence[int | str], **fields: Any) -> dict[str, Any]:
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


def received(*events: dict[str, Any], buffer_size: int = 0) -> RecordingCacheListener:
    """What a listener hears of one poll of an engine with two ranks."""
    cache, listener = CacheEvents(2, BLOCK, buffer_size), RecordingCacheListener()
    cache.subscribe(listener)
    cache.receive(events)
    return listener


FOUR = [1, 2, 3, 4]
#: A name of the newer cache manager, and that of a parent.
NAME, PARENT = "ff" * 32, "00" * 7 + "05" + "ab" * 24
KEY = {"type": "mm_key", "hash": "fedcba9876543210" + "ab" * 24, "start_offset": 0}
IMAGE = {"mm_objects": [{"mm_hash": 0xFEDCBA9876543210, "offsets": []}]}
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
        pytest.param(
            [stored(block(1, FOUR), block(2, FOUR, mm_keys=[KEY]))],
            [Stored(FOUR * 2, [4, 4], [1, 2], None, None, [None, IMAGE])],
            id="a block of an image",
        ),
        pytest.param(
            [stored(block(1, FOUR), block(2, [NAME, 6, 7, 8], mm_keys=[KEY]), block(3, FOUR)), removed(2)],
            [Stored(FOUR, [4], [1], None, None)],
            id="an image's digest in place of a token ends the blocks, as a partial block does",
        ),
        ([{"event_id": 0, "data": CREATED}], []),
        ([{"data": {"type": "updated", "block_hash": 1, "cache_level": {"type": "event_diff"}}}], []),
        ([{"data": {"type": "something new"}}], []),
    ],
)
def test_events_of_the_engine_become_those_of_the_router(
    events: list[dict[str, Any]], expected: list[Stored | Removed]
) -> None:
    assert received(*events).events == expected


def test_only_events_of_the_widest_attention_window_are_published() -> None:
    """With sliding windows each block is told of once per window, under another hash."""
    heard = received(
        {"data": CREATED, "window_size": 128},
        {"data": CREATED, "window_size": 4096},
        stored(block(1, [1, 2, 3, 4]), window_size=128),
        stored(block(2, [1, 2, 3, 4]), window_size=4096),
        removed(1, window_size=128),
    )
    assert heard.events == [Stored([1, 2, 3, 4], [4], [2], None, None)]


@pytest.mark.parametrize(
    ("ids", "warnings"),
    [
        ([(0, None), (1, None), (2, None)], []),
        ([(7, None), (8, None)], []),
        ([(None, None), (None, None)], []),
        ([(0, None), (3, None), (4, None)], ["KV event 3 came instead of 1"]),
        ([(5, None), (0, None)], ["KV event 0 came instead of 6"]),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], []),
        ([(0, 0), (0, 1), (2, 1)], ["KV event 2 came instead of 1"]),
    ],
)
def test_gap_in_event_ids_logs_a_warning(
    ids: list[tuple[int | None, int | None]], warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    events = [removed() if event_id is None else removed(event_id=event_id) for event_id, _ in ids]
    for event, (_, rank) in zip(events, ids, strict=True):
        if rank is not None:
            event["attention_dp_rank"] = rank
    received(*events)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == warnings


@pytest.mark.parametrize(
    ("ids", "is_advised"),
    [([0, 5, 6, 7], True), ([0, 5, 6], False), ([5, 0, 1, 2], False)],
    ids=["a full buffer", "a part of a buffer", "the numbers begin again"],
)
def test_a_larger_buffer_is_advised_only_where_the_buffer_was_full(
    ids: list[int], is_advised: bool, caplog: pytest.LogCaptureFixture
) -> None:
    heard = received(*(removed(event_id=event_id) for event_id in ids), buffer_size=4)
    assert ("raise kv_cache_config.event_buffer_max_size (now 4)" in caplog.text) is is_advised
    assert heard.num_lost == (4 if ids[0] == 0 else 0)


def test_many_gaps_and_many_unfit_events_are_one_short_line_each(caplog: pytest.LogCaptureFixture) -> None:
    gaps = [removed(event_id=event_id) for event_id in range(0, 100, 5)]
    unfit = {"data": {"type": "stored", "blocks": list(range(1000))}}
    received(*gaps, *[unfit] * 20)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == ["KV event 5 came instead of 1", "kv-events"]
    assert "TypeError" in lines[1]
    assert len(caplog.text) < 1000


@given(st.integers(0, 2**64 - 1))
def test_signed_hash_has_the_same_64_bits(number: int) -> None:
    assert signed(number) % 2**64 == number
    assert -(2**63) <= signed(number) < 2**63


def test_an_event_that_makes_no_sense_keeps_nothing_from_those_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert received({"data": {}}, removed(5)).events == [Removed([5])]
    assert "kv-events: an event of the engine cannot be published" in caplog.text


def test_after_lost_events_nothing_is_taken_for_cached() -> None:
    class Forgetful(IndexListener):
        def lost(self, rank: int, count: int) -> None:
            index.clear()

    index = CachedPrefix(BLOCK)
    events = events_for(Forgetful(index), BLOCK)
    events.receive([stored(block(1, [10, 11, 12, 13]), event_id=1)])
    assert len(index) == 1
    events.receive([stored(block(2, [14, 15, 16, 17]), event_id=5)])
    assert index.num_cached([10, 11, 12, 13, 1]) == 0
    assert index.num_cached([14, 15, 16, 17, 1]) == BLOCK


# -- listeners that come and go


def test_a_listener_that_comes_late_begins_with_the_blocks_that_are_stored_parents_first() -> None:
    cache, late = CacheEvents(1, BLOCK, 0), RecordingCacheListener()
    salted = {"cache_salt": "tenant-1"}
    cache.receive(
        [
            stored(block(1, [0, 1, 2, 3], **salted), block(2, [4, 5, 6, 7], **salted), parent=7),
            stored(block(7, [9, 9, 9, 9], mm_keys=[KEY])),
            stored(block(3, [8, 8, 8, 8])),
            removed(3),
        ]
    )
    cache.subscribe(late)
    assert late.events == [
        Stored([9, 9, 9, 9], [4], [7], None, None, [IMAGE]),
        Stored([0, 1, 2, 3], [4], [1], 7, "tenant-1"),
        Stored([4, 5, 6, 7], [4], [2], 1, "tenant-1"),
    ]


def test_a_renewed_listener_leaves_out_blocks_whose_parent_was_removed_and_gets_what_comes_later() -> None:
    listener = RecordingCacheListener()
    cache = events_for(listener, BLOCK)
    cache.receive([stored(block(1, [0, 1, 2, 3]), block(2, [4, 5, 6, 7])), removed(1)])
    assert len(listener.events) == 2
    cache.renew()
    cache.receive([removed(2)])
    assert (listener.times_opened, listener.events) == (2, [Removed([2])])


def test_the_listener_of_a_later_role_is_told_of_no_block_that_no_router_knows() -> None:
    first, later = RecordingCacheListener(), RecordingCacheListener()
    cache = events_for(first, BLOCK)
    cache.receive([stored(block(1, [0, 1, 2, 3]), block(2, [4, 5]))])
    cache.unsubscribe(first)
    cache.subscribe(later)
    cache.receive([removed(2), removed(1)])
    assert later.events == [Stored([0, 1, 2, 3], [4], [1], None, None), Removed([1])]
    assert len(first.events) == 1


def test_gap_between_two_role_terms_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    cache = CacheEvents(1, BLOCK, 0)
    cache.receive([removed(event_id=0)])
    later = RecordingCacheListener()
    cache.subscribe(later)
    cache.receive([removed(event_id=3)])
    assert (later.num_lost, "KV event 3 came instead of 1" in caplog.text) == (2, True)


def test_a_listener_that_fails_keeps_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RecordingCacheListener):
        def stored(self, rank: int, blocks: StoredBlocks) -> None:
            raise OSError("the socket is closed")

    listener = RecordingCacheListener()
    cache = events_for(Broken(), BLOCK)
    cache.subscribe(listener)
    cache.receive([stored(block(1, FOUR)), removed(1)])
    assert listener.events == [Stored(FOUR, [4], [1], None, None), Removed([1])]
    assert "publishing failed: OSError: the socket is closed" in caplog.text


#: A number of blocks to store, a block to remove, or what a listener does.
steps = st.lists(
    st.one_of(
        st.integers(1, 3), st.integers(-30, -1), st.sampled_from(["subscribe", "unsubscribe", "renew"])
    ),
    max_size=60,
)


@given(steps)
def test_no_event_is_lost_or_doubled_over_any_sequence_of_terms(steps: list[int | str]) -> None:
    """What each term's listener has heard adds up to the cache as it is, and each event came once."""
    cache, listener = CacheEvents(1, BLOCK, 0), RecordingCacheListener()
    there = dict[int, list[int]]()
    is_subscribed, event_id = False, 0
    for step in steps:
        if step == "subscribe" and not is_subscribed:
            listener = RecordingCacheListener()
            cache.subscribe(listener)
            is_subscribed = True
        elif step == "unsubscribe":
            cache.unsubscribe(listener)
            is_subscribed = False
        elif step == "renew":
            cache.renew()
        elif isinstance(step, int) and step > 0:
            new = {event_id * 10 + number: [event_id, number, 0, 0] for number in range(step)}
            there |= new
            blocks = [block(block_hash, tokens) for block_hash, tokens in new.items()]
            cache.receive([stored(each, event_id=event_id + n) for n, each in enumerate(blocks)])
            event_id += step
        elif isinstance(step, int) and there:
            gone = list(there)[step % len(there)]
            del there[gone]
            cache.receive([removed(gone, event_id=event_id)])
            event_id += 1
        if is_subscribed:
            assert in_index(listener) == there
    assert listener.num_lost == 0


def in_index(listener: RecordingCacheListener) -> dict[int, list[int]]:
    """The blocks that a router would know. Fails for a block that comes twice, or goes twice."""
    known = dict[int, list[int]]()
    for event in listener.events:
        if isinstance(event, Removed):
            for block_hash in event.block_hashes:
                del known[block_hash]
        else:
            (block_hash,) = event.block_hashes
            assert block_hash not in known
            known[block_hash] = event.token_ids
    return known
