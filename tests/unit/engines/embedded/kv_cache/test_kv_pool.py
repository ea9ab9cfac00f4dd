"""Rows, places and copies are the same memory as `kv[block, layer, k|v, slot, head, dim]`."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool

BLOCKS, LAYERS, SLOTS, HEADS, DIM = 5, 3, 4, 2, 8


def filled() -> KvPool:
    shape = (BLOCKS, LAYERS, 2, SLOTS, HEADS, DIM)
    return KvPool(torch.arange(torch.Size(shape).numel()).view(shape))


@given(block=st.integers(0, BLOCKS - 1), layer=st.integers(0, LAYERS - 1), offset=st.integers(0, SLOTS - 1))
def test_row_of_a_place_has_key_and_value_of_every_layer(block: int, layer: int, offset: int) -> None:
    pool = filled()
    place = block * pool.rows_per_block + offset
    assert torch.equal(pool.rows[place + pool.key_row(layer)], pool.kv[block, layer, 0, offset])
    assert torch.equal(pool.rows[place + pool.value_row(layer)], pool.kv[block, layer, 1, offset])


@given(st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True), st.integers(0, LAYERS - 1))
def test_keys_and_values_of_blocks_are_concatenated_in_order(blocks: list[int], layer: int) -> None:
    pool = filled()
    keys, values = pool.keys_and_values(layer, torch.tensor(blocks))
    for made, kind in ((keys, 0), (values, 1)):
        assert torch.equal(made, pool.kv[blocks, layer, kind].reshape(-1, HEADS, DIM))


def test_rows_share_the_pools_memory() -> None:
    pool = filled()
    pool.rows[pool.rows_per_block + pool.value_row(1)] = -1
    assert (pool.kv[1, 1, 1, 0] == -1).all()
    assert (pool.kv == -1).sum() == HEADS * DIM
