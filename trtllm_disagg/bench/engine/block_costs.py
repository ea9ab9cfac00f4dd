"""What a request's KV blocks cost in pools that are full of other prompts. No model.

    python -m trtllm_disagg.bench.engine.block_costs

prints, for pools up to a million blocks, the median microseconds of each stage of a request of 2048 tokens of which
half is known: naming its blocks, looking them up, looking for a block that fits in part, having new ones (which evicts
as many others), committing and releasing all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from trtllm_disagg.embedded.block_manager import BlockManager, KvEventLog

POOLS = (1_000, 10_000, 100_000, 1_000_000)
STAGES = ("keys", "match", "match_start", "acquire", "allocate", "commit", "release")
_BLOCK_TOKENS = 32
_REQUEST_BLOCKS = 64
_KNOWN_BLOCKS = _REQUEST_BLOCKS // 2
_REQUESTS = 50


def costs_per_block(pool: int) -> tuple[float, float]:
    """Seconds: naming and finding a known block, evicting for a new one."""
    stages = dict(zip(STAGES, stage_seconds(pool), strict=True))
    lookup = stages["keys"] + stages["match"] + stages["acquire"]
    return lookup / _KNOWN_BLOCKS, stages["allocate"] / (_REQUEST_BLOCKS - _KNOWN_BLOCKS)


def stage_seconds(pool: int) -> list[float]:
    """The median request's time in each of STAGES."""
    events = KvEventLog(100_000, 4096)
    blocks = BlockManager(pool, _BLOCK_TOKENS, enable_reuse=True, enable_partial_reuse=True, events=events)
    prompts = pool // _KNOWN_BLOCKS
    for prompt in range(prompts):
        held = blocks.allocate(_KNOWN_BLOCKS)
        blocks.commit(_tokens(prompt, _KNOWN_BLOCKS), held, [], b"")
        blocks.release(held)
        events.take()
    times = []
    for number in range(min(_REQUESTS, max(1, prompts // 4))):
        known = _tokens(prompts - 1 - number, _KNOWN_BLOCKS)  # the newest ones are evicted last
        fresh = _tokens(prompts + number, _REQUEST_BLOCKS)[len(known) :]
        times.append([later - earlier for earlier, later in pairwise(_one_request(blocks, known + fresh))])
        events.take()  # as every step does
    blocks.check()
    return [float(seconds) for seconds in np.median(times, axis=0)]


def _one_request(blocks: BlockManager, prompt: list[int]) -> Iterator[float]:
    """The time before and after each stage."""
    yield time.perf_counter()
    keys = blocks.prompt_keys(prompt, b"")
    yield time.perf_counter()
    known = blocks.match(keys)
    yield time.perf_counter()
    blocks.match_start(keys[len(known) - 1], prompt[len(known) * _BLOCK_TOKENS :][:_BLOCK_TOKENS], b"")
    yield time.perf_counter()
    blocks.acquire(known)
    yield time.perf_counter()
    fresh = blocks.allocate(_REQUEST_BLOCKS - len(known))
    yield time.perf_counter()
    blocks.commit(prompt, known + fresh, keys[: len(known)], b"")
    yield time.perf_counter()
    blocks.release(known + fresh)
    yield time.perf_counter()


def _tokens(prompt: int, blocks: int) -> list[int]:
    """No two prompts have a block in common."""
    start = prompt * _REQUEST_BLOCKS * _BLOCK_TOKENS
    return list(range(start, start + blocks * _BLOCK_TOKENS))


def main() -> None:
    print(f"{'blocks':>9}", *(f"{stage:>12}" for stage in (*STAGES, "us together")))
    for pool in POOLS:
        stages = [1e6 * seconds for seconds in stage_seconds(pool)]
        print(f"{pool:>9}", *(f"{each:12.1f}" for each in (*stages, sum(stages))), flush=True)


if __name__ == "__main__":
    main()
