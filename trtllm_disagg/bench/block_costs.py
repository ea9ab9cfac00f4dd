"""What the KV accounting of one request costs in pools of different sizes.

    python -m trtllm_disagg.bench.block_costs

prints, for each pool, microseconds (median of many requests) for a prompt of 1024 tokens of which half is known:
naming its blocks, looking them up, looking for a block that fits in part, allocating and committing the rest (which
evicts as many others: the pool is full), and releasing all. One thread, no model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

from trtllm_disagg.embedded.kv_cache.block_manager import BlockManager, KvEventLog

SIZE = 32
BLOCKS_PER_REQUEST = 32
POOLS = (1_000, 10_000, 100_000, 1_000_000)
STAGES = ("keys", "match", "match_start", "allocate", "commit", "release")


def full_pool(num_blocks: int, events: KvEventLog) -> tuple[BlockManager, Callable[[int], list[int]]]:
    """Every block is known and unused: prompts whose first halves are all different, and shared by nobody yet."""
    blocks = BlockManager(num_blocks, SIZE, enable_reuse=True, enable_partial_reuse=True, events=events)
    half = SIZE * BLOCKS_PER_REQUEST // 2

    def stem(i: int) -> list[int]:
        return [(i * 7919 + p * (i % 13 + 1)) % 50_000 for p in range(half)]

    for i in range(num_blocks // (BLOCKS_PER_REQUEST // 2) + 1):
        taken = blocks.allocate(BLOCKS_PER_REQUEST // 2)
        blocks.commit(stem(i), taken, [], b"")
        blocks.release(taken)
        events.take()
    return blocks, stem


def one_request(blocks: BlockManager, prompt: list[int]) -> Iterator[float]:
    """The time after each stage."""
    yield time.perf_counter()
    keys = blocks.prompt_keys(prompt, b"")
    yield time.perf_counter()
    known = blocks.match(keys)
    yield time.perf_counter()
    blocks.match_start(keys[len(known) - 1], prompt[len(known) * SIZE :][:SIZE], b"")
    yield time.perf_counter()
    blocks.acquire(known)
    fresh = blocks.allocate(BLOCKS_PER_REQUEST - len(known))
    yield time.perf_counter()
    blocks.commit(prompt, known + fresh, keys[: len(known)], b"")
    yield time.perf_counter()
    blocks.release(known + fresh)
    yield time.perf_counter()


def measure(num_blocks: int, requests: int = 50) -> tuple[list[float], float]:
    """(microseconds of each stage, seconds to make an empty pool)."""
    started = time.perf_counter()
    BlockManager(num_blocks, SIZE, enable_reuse=True, events=KvEventLog(0, 4096))
    seconds = time.perf_counter() - started
    events = KvEventLog(100_000, 4096)
    blocks, stem = full_pool(num_blocks, events)
    last = num_blocks // (BLOCKS_PER_REQUEST // 2)
    times = []
    for i in range(min(requests, last // 4)):
        known = stem(last - i)  # the newest ones are evicted last
        prompt = known + [60_000 + i] * (SIZE * BLOCKS_PER_REQUEST - len(known))
        stamps = list(one_request(blocks, prompt))
        events.take()  # as every step does
        times.append([(b - a) * 1e6 for a, b in pairwise(stamps)])
    blocks.check()
    return [statistics.median(stage) for stage in zip(*times, strict=True)], seconds


def main() -> None:
    print(f"{'blocks':>9}", *(f"{stage:>12}" for stage in STAGES), f"{'us together':>12}  new pool, s")
    for num_blocks in POOLS:
        stages, seconds = measure(num_blocks)
        print(
            f"{num_blocks:>9}",
            *(f"{stage:12.1f}" for stage in stages),
            f"{sum(stages):12.1f}  {seconds:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
