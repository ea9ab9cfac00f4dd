"""What a request's KV blocks cost in a pool that is full of other prompts: looking them up, and having new ones."""

from __future__ import annotations

import random
import statistics
import time

from trtllm_disagg.bench.engine.remote import Start
from trtllm_disagg.embedded.kv_cache.block_manager import BlockManager, KvEventLog

_TOKENS_PER_BLOCK = 32
_REQUEST_BLOCKS = 64
_REQUESTS = 50


class BlockCosts:
    def __init__(self, start: Start) -> None:
        pass

    def per_block(self, pool: int) -> dict[str, float]:
        """Median seconds a block: `lookup` names and finds a prompt's blocks, `allocation` evicts for new ones."""
        blocks = BlockManager(pool, _TOKENS_PER_BLOCK, enable_reuse=True, events=KvEventLog(0, 0))
        prompts = range(pool // _REQUEST_BLOCKS)
        for prompt in prompts:
            held = blocks.allocate(_REQUEST_BLOCKS)
            blocks.commit(_tokens(prompt), held, [], b"")
            blocks.release(held)
        source = random.Random(0)
        lookups, allocations = [], []
        for number in range(_REQUESTS):
            tokens = _tokens(source.choice(prompts))
            started = time.perf_counter()
            known = blocks.match(blocks.prompt_keys(tokens, b""))
            blocks.acquire(known)
            lookups.append(time.perf_counter() - started)
            # What the allocations of earlier turns have evicted is computed again.
            held = known + blocks.allocate(_REQUEST_BLOCKS - len(known))
            blocks.commit(tokens, held, [], b"")
            blocks.release(held)
            started = time.perf_counter()
            held = blocks.allocate(_REQUEST_BLOCKS)
            allocations.append(time.perf_counter() - started)
            blocks.commit(_tokens(len(prompts) + number), held, [], b"")
            blocks.release(held)
        return {
            "lookup": statistics.median(lookups) / _REQUEST_BLOCKS,
            "allocation": statistics.median(allocations) / _REQUEST_BLOCKS,
        }

    def close(self) -> None:
        pass


def _tokens(prompt: int) -> list[int]:
    """No two prompts have a block in common."""
    count = _REQUEST_BLOCKS * _TOKENS_PER_BLOCK
    return list(range(prompt * count, (prompt + 1) * count))
