"""Paged KV accounting under any order of operations, and the events that describe it to the router."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.replay import Replay
from trtllm_disagg.engines.embedded.kv_cache.block_manager import (
    ROOT,
    BlockManager,
    KvEventLog,
    block_key,
    event_hash,
)

SIZE = 2
NUM_BLOCKS = 6


def manager(num_blocks: int = NUM_BLOCKS, *, reuse: bool = True, max_events: int = 10_000) -> BlockManager:
    return BlockManager(num_blocks, SIZE, enable_reuse=reuse, events=KvEventLog(max_events, 64))


def store(blocks: BlockManager, tokens: Sequence[int]) -> list[int]:
    """Allocate, fill and commit blocks for these tokens; still in use."""
    taken = blocks.allocate(len(tokens) // SIZE)
    blocks.commit(tokens, taken, [], b"")
    return taken


class Holder:
    """A sequence: its blocks, and the keys of those that are committed."""

    def __init__(self, tokens: list[int], blocks: list[int], keys: list[bytes]) -> None:
        self.tokens, self.blocks, self.keys = tokens, blocks, keys


#: Few, so that prefixes are shared, committed twice, and evicted from under one another all the time.
PROMPTS = [[0] * 2, [0] * 4, [0] * 6, [0] * 7, [1] * 2, [1] * 4, [1] * 3, [0, 0, 1, 1], [0, 0, 1, 1, 0, 0]]


class Simulation:
    """Sequences come, fill up and go."""

    def __init__(self) -> None:
        self.log = KvEventLog(10_000, 64)
        self.blocks = BlockManager(NUM_BLOCKS, SIZE, enable_reuse=True, events=self.log)
        self.replay = Replay()
        self.holders: list[Holder] = []
        self.quarantined = 0

    def admit(self, which: int) -> None:
        tokens = PROMPTS[which % len(PROMPTS)]
        known = self.blocks.match(self.blocks.prompt_keys(tokens, b""))
        wanted = -(-len(tokens) // SIZE) - len(known)
        if not self.blocks.can_allocate(wanted, besides=known):
            return
        self.blocks.acquire(known)
        fresh = self.blocks.allocate(wanted)
        assert fresh == sorted(fresh)
        assert not set(fresh) & {b for holder in self.holders for b in holder.blocks}, "given out twice"
        keys = self.blocks.prompt_keys(tokens, b"")[: len(known)]
        self.holders.append(Holder(tokens, known + fresh, keys))

    def commit(self, which: int) -> None:
        """One more block is full."""
        unfinished = [h for h in self.holders if len(h.keys) < len(h.tokens) // SIZE]
        if unfinished:
            holder = unfinished[which % len(unfinished)]
            computed = holder.tokens[: (len(holder.keys) + 1) * SIZE]
            self.blocks.commit(computed, holder.blocks, holder.keys, b"")
            assert holder.keys == self.blocks.prompt_keys(computed, b"")

    def release(self, which: int) -> None:
        if self.holders:
            self.blocks.release(self.holders.pop(which % len(self.holders)).blocks)

    def evict(self, which: int) -> None:
        """Blocks that no sequence uses are forgotten."""
        self.blocks.release(self.blocks.allocate(self.blocks.num_available))

    def take_over(self, which: int) -> None:
        """A sequence goes on from the start of a known block that no sequence uses."""
        tokens = PROMPTS[which % len(PROMPTS)]
        found = self.blocks.match_start(ROOT, tokens[:1], b"")
        if found is not None and self.blocks.is_spare(found.block):
            self.blocks.take_over(found.block)
            self.holders.append(Holder([tokens[0], 2], [found.block], []))

    def quarantine(self, which: int) -> None:
        """A pull timed out: its fresh blocks are lost."""
        if self.holders and not self.quarantined:
            holder = self.holders.pop(which % len(self.holders))
            fresh = [block for block in holder.blocks if block not in self.blocks.key_of]
            self.blocks.quarantine(fresh)
            self.blocks.release([block for block in holder.blocks if block not in fresh])
            self.quarantined = len(fresh)

    def check(self) -> None:
        self.blocks.check()
        used = {block for holder in self.holders for block in holder.blocks}
        assert self.blocks.num_used == len(used) + self.quarantined
        assert self.blocks.num_quarantined == self.quarantined
        self.replay.apply(self.log.take())
        assert self.replay.known == {event_hash(key) for key in self.blocks.key_of.values()}


step = st.tuples(
    st.sampled_from(["admit", "admit", "commit", "commit", "release", "evict", "take_over", "quarantine"]),
    st.integers(0, 99),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(step, min_size=30, max_size=60))
def test_block_states_and_events_are_consistent_after_any_operations(steps: list[tuple[str, int]]) -> None:
    simulation = Simulation()
    for action, which in steps:
        getattr(simulation, action)(which)
        simulation.check()
    while simulation.holders:
        simulation.release(0)
    simulation.check()
    assert simulation.blocks.num_available == NUM_BLOCKS - simulation.quarantined


# -- eviction


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    blocks = manager(4)
    prefix = store(blocks, [1, 2, 3, 4, 5, 6])
    blocks.release(prefix)
    keys = blocks.prompt_keys([1, 2, 3, 4, 5, 6], b"")
    lengths = []
    for _ in range(4):
        blocks.allocate(1)
        lengths.append(len(blocks.match(keys)))
    assert lengths == [3, 2, 1, 0], "the free block goes first, then the prefix from its end"


def test_the_prefix_that_was_used_longest_ago_is_evicted_first() -> None:
    blocks = manager(4)
    old, new = [1, 2, 3, 4], [5, 6, 7, 8]
    first, second = store(blocks, old), store(blocks, new)
    blocks.release(first)
    blocks.release(second)
    blocks.acquire(first)
    blocks.release(first)
    blocks.allocate(2)
    assert blocks.match(blocks.prompt_keys(old, b"")) == first
    assert blocks.match(blocks.prompt_keys(new, b"")) == []


def test_without_block_reuse_no_block_is_cached() -> None:
    blocks = manager(reuse=False)
    blocks.release(store(blocks, [1, 2, 3, 4]))
    assert not blocks.key_of
    assert blocks.match(blocks.prompt_keys([1, 2, 3, 4], b"")) == []


def test_a_key_depends_on_everything_before_its_block() -> None:
    assert block_key(b"", [1, 2]) != block_key(b"", [2, 1])
    assert block_key(block_key(b"", [1, 2]), [3, 4]) != block_key(block_key(b"", [2, 1]), [3, 4])


# -- events


def test_a_full_event_buffer_drops_the_oldest_and_ids_show_the_gap() -> None:
    log = KvEventLog(3, 64)
    blocks = BlockManager(8, SIZE, enable_reuse=True, events=log)
    for token in range(6):
        store(blocks, [token, token])
    assert [event["event_id"] for event in log.take()] == [4, 5, 6]
    assert log.take() == []


def test_events_are_off_without_a_buffer() -> None:
    log = KvEventLog(0, 64)
    store(BlockManager(2, SIZE, enable_reuse=True, events=log), [1, 2])
    assert log.take() == []


# -- the start of a block


def test_the_known_block_that_shares_most_of_the_start_is_found_below_its_parent_only() -> None:
    blocks = BlockManager(8, 4, enable_reuse=True, events=KvEventLog(0, 64))
    first, second = (blocks.allocate(2) for _ in range(2))
    blocks.commit([1, 2, 3, 4, 5, 6, 7, 8], first, [], b"")
    blocks.commit([1, 2, 3, 4, 5, 6, 9, 9], second, [], b"")
    parent = blocks.prompt_keys([1, 2, 3, 4], b"")[0]
    assert blocks.match_start(parent, [5, 6, 9], b"") == (second[1], 3)
    assert blocks.match_start(ROOT, [1, 2, 0], b"") == (first[0], 2)
    assert blocks.match_start(ROOT, [5, 6, 9], b"") is None
    assert blocks.match_start(ROOT, [1, 2, 0], b"salt") is None
    assert blocks.match_start(parent, [], b"") is None


def test_block_taken_over_is_removed_from_the_cache() -> None:
    log = KvEventLog(100, 64)
    blocks = BlockManager(4, 2, enable_reuse=True, events=log)
    held = store(blocks, [1, 2, 3, 4])
    parent, leaf = held
    assert not blocks.is_spare(leaf), "in use"
    blocks.release(held)
    assert blocks.is_spare(leaf)
    assert not blocks.is_spare(parent), "another known block comes after it"
    log.take()
    blocks.take_over(leaf)
    (event,) = log.take()
    assert event["data"]["type"] == "removed"
    assert blocks.match(blocks.prompt_keys([1, 2, 3, 4], b"")) == [parent]
    blocks.check()
    blocks.release([leaf])
    assert blocks.num_available == 4


def test_a_block_whose_start_was_copied_is_evicted_last() -> None:
    blocks = manager(2)
    old, new = store(blocks, [1, 2]), store(blocks, [3, 4])
    blocks.release(old)
    blocks.release(new)
    blocks.touch(old[0])
    assert blocks.allocate(1) == new


def test_cost_of_a_request_does_not_depend_on_the_pool_size() -> None:
    """Counted in Python calls and lines, not in seconds: the same at any load of the machine."""
    assert lines_run_by_a_request(1 << 10) == lines_run_by_a_request(1 << 15)


def lines_run_by_a_request(num_blocks: int) -> int:
    blocks = BlockManager(num_blocks, 4, enable_reuse=True, events=KvEventLog(0, 64))
    for i in range(num_blocks // 2):
        blocks.release(store_in_fours(blocks, [9, i >> 8, i & 255, 7] * 2))
    prompt = [9, 0, 3, 7, 9, 0, 3, 7, 9, 9, 9, 9]
    lines = 0

    def count(_frame: Any, _event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    # A collection runs lines of others, whenever there is garbage enough.
    gc.disable()
    sys.settrace(count)
    try:
        keys = blocks.prompt_keys(prompt, b"")
        known = blocks.match(keys)
        found = blocks.match_start(keys[1], [9, 0, 3], b"")
        blocks.acquire(known)
        fresh = blocks.allocate(6)
        blocks.commit(prompt * 2, known + fresh, keys, b"")
        blocks.release(known + fresh)
    finally:
        sys.settrace(before)
        gc.enable()
    assert (len(known), found) == (2, None)
    blocks.check()
    return lines


def store_in_fours(blocks: BlockManager, tokens: Sequence[int]) -> list[int]:
    taken = blocks.allocate(len(tokens) // 4)
    blocks.commit(tokens, taken, [], b"")
    return taken
