"""What only the shared memory transport does."""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pools import Pool, pool_in_a_child
from trtllm_disagg.engines.embedded.kv_transfer.base import common_runs
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import SharedMemoryTransport
from trtllm_disagg.errors import ConfigError, KvTransferError

ids = st.lists(st.integers(0, 30), unique=True)


@given(ids, ids)
def test_common_runs_cover_every_pair_once_and_are_maximal(remote: list[int], local: list[int]) -> None:
    size = min(len(remote), len(local))
    theirs, mine = np.asarray(remote[:size], np.int32), np.asarray(local[:size], np.int32)
    runs = common_runs(theirs, mine)
    copied = [(int(theirs[start]) + i, int(mine[start]) + i) for start, length in runs for i in range(length)]
    assert copied == list(zip(theirs.tolist(), mine.tolist(), strict=True))
    for (start, length), (following, _) in itertools.pairwise(runs):
        end = start + length - 1
        assert following == end + 1
        assert theirs[following] != theirs[end] + 1 or mine[following] != mine[end] + 1


def mapped_pools() -> set[str]:
    """Inodes of the pools that are in this process's memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:trtllm-disagg-kv" in line}


def test_the_memory_of_a_dead_sender_is_given_back_when_its_successor_comes() -> None:
    receiver, successor = Pool("SHARED_MEMORY", 8, "receiver"), Pool("SHARED_MEMORY", 8, "successor")
    own = mapped_pools()
    with pool_in_a_child("SHARED_MEMORY") as (card, _):
        receiver.read(card, [0], [0])
    assert len(mapped_pools() - own) == 1
    receiver.read(successor.card, [0], [0])
    assert mapped_pools() == own
    for pool in (receiver, successor):
        pool.close()


def test_peers_that_come_at_the_same_time_do_not_disturb_each_other() -> None:
    sender, receiver = Pool("SHARED_MEMORY", 8, "sender"), Pool("SHARED_MEMORY", 8, "receiver")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def read_as_others(name: str) -> None:
        for number in range(80):
            card = msgspec.structs.replace(sender.card, sender=f"{name}-{number}")
            receiver.read(card, [0], [0])

    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(read_as_others, "abcd"))
    finally:
        sys.setswitchinterval(interval)
    for pool in (sender, receiver):
        pool.close()


def test_closed_pool_leaves_no_file_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    pool = Pool("SHARED_MEMORY", 8, "sender")
    pool.close()
    pool.close()
    del pool
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_pool_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="NIXL on a CUDA device"):
        SharedMemoryTransport().allocate((1, 2, 1, 1, 1, 1), torch.float32, torch.device("cuda"))


def test_blocks_of_another_size_are_not_copied() -> None:
    """One byte would be copied into the whole of a block."""
    sender, receiver = Pool("SHARED_MEMORY", 8, "sender"), Pool("SHARED_MEMORY", 8, "receiver")
    bytes_of_pool = msgspec.structs.replace(sender.card, num_blocks=sender.kv.nbytes)
    with pytest.raises(KvTransferError, match="blocks of 1 bytes do not fit"):
        receiver.read(bytes_of_pool, [0], [0])
    for pool in (sender, receiver):
        pool.close()
