"""Workers are processes of their own: KV goes from one process's device memory into the other's."""

from __future__ import annotations

import random

from trtllm_disagg.tools.bench.kv_ends import CopyPools, connected
from trtllm_disagg.tools.bench.kv_shapes import KvShape

SHAPE = KvShape("two-layers", layers=2, kv_heads=2, head_dim=64, dtype="float32", prompt_tokens=2048)


def test_pulls_put_every_byte_in_its_place_on_the_gpu() -> None:
    with connected("NIXL", SHAPE, "cuda") as (_, receiver):
        assert receiver.pool.is_cuda
        for seed in range(3):
            remote, local = SHAPE.blocks("scattered", seed=seed), SHAPE.blocks("scattered", seed=seed + 7)
            receiver.pull(remote, local)
            receiver.require_arrived(remote, local)


def test_the_yardstick_copies_exactly_the_given_blocks() -> None:
    pools = CopyPools(SHAPE, "cuda")
    pools.source.random_()
    remote, local = SHAPE.blocks("scattered", seed=1), SHAPE.blocks("scattered", seed=2)
    pools.copying(SHAPE.ranges(remote, local))()
    assert pools.target[local].equal(pools.source[remote])
    untouched = random.Random(0).sample(sorted(set(range(SHAPE.pool_blocks)) - set(local)), 8)
    assert not pools.target[untouched].any()
