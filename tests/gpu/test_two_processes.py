"""Workers are processes of their own: KV goes from one process's device memory into the other's."""

from __future__ import annotations

import random

from tests.support.benchmark_scripts import script

transfer = script("transfer")
SHAPE = transfer.KvShape("two-layers", layers=2, kv_heads=2, head_dim=64, dtype="float32", prompt_blocks=64)


def test_pulls_put_every_byte_in_its_place_on_the_gpu() -> None:
    with transfer.connected("NIXL", SHAPE, "cuda") as (_, _, receiver):
        assert receiver.pool.is_cuda
        for seed in range(3):
            remote, local = SHAPE.blocks("scattered", seed=seed), SHAPE.blocks("scattered", seed=seed + 7)
            receiver.pull(remote, local)
            receiver.require_arrived(remote, local)


def test_the_yardstick_copies_exactly_the_given_blocks() -> None:
    source, target = transfer.copy_pools(SHAPE, "cuda")
    source.random_()
    remote, local = SHAPE.blocks("scattered", seed=1), SHAPE.blocks("scattered", seed=2)
    transfer.copying((source, target), SHAPE.ranges(remote, local))()
    assert target[local].equal(source[remote])
    untouched = random.Random(0).sample(sorted(set(range(SHAPE.pool_blocks)) - set(local)), 8)
    assert not target[untouched].any()
