"""The start of a known block is found, copied or taken over; and what all lookups of a request cost."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

from trtllm_disagg.engines.embedded.kv_cache.block_manager import ROOT, BlockManager, KvEventLog

SIZE = 2


def manager(num_blocks: int = 6, *, reuse: bool = True, max_events: int = 10_000) -> BlockManager:
    return BlockManager(num_blocks, SIZE, enable_reuse=reuse, events=KvEventLog(max_events, 64))


def store(blocks: BlockManager, tokens: Sequence[int]) -> list[int]:
    """Allocate, fill and commit blocks for these tokens; still in use."""
    taken = blocks.allocate(len(tokens) // SIZE)
    blocks.commit(tokens, taken, [], b"")
    return taken


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
