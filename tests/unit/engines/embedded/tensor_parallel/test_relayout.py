"""KV between pools that are divided differently: every head of every block arrives, bit for bit, and no other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.nixl_agents import ScriptedAgents
from trtllm_disagg.engines.embedded.kv_transfer.base import (
    STAGING_BYTES,
    BlockPairs,
    KvLayout,
    PeerMetadata,
    ReadTimeoutError,
    StagingTransport,
)
from trtllm_disagg.engines.embedded.kv_transfer.nixl import NixlTransport
from trtllm_disagg.engines.embedded.kv_transfer.transports import TRANSPORTS, create_transport
from trtllm_disagg.engines.embedded.tensor_parallel.transfers import (
    Shard,
    ShardReader,
    join_addresses,
    overlaps,
    shards_of,
)
from trtllm_disagg.errors import HandoffRefusedError, KvTransferError

LAYERS, SLOTS, HEADS, DIM = 2, 4, 4, 8
THEIRS, OURS = 12, 10
LAYOUT = KvLayout("m", LAYERS, SLOTS, HEADS, DIM, "float32")
#: Scattered, and runs; remote and local in different orders.
REMOTE, LOCAL = [7, 2, 3, 4, 11, 0], [1, 5, 6, 9, 0, 2]


@given(st.data())
def test_every_head_is_read_exactly_once(data: st.DataObject) -> None:
    ranks, shards = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    heads = data.draw(st.integers(1, 4)) * int(np.lcm(ranks, shards))
    for rank in range(ranks):
        mine = np.full(heads // ranks, -1)
        for part in overlaps(rank, ranks, shards, heads):
            theirs = np.arange(heads).reshape(shards, -1)[part.shard]
            assert (mine[part.mine] == -1).all()
            mine[part.mine] = theirs[part.theirs]
        assert mine.tolist() == np.arange(heads).reshape(ranks, -1)[rank].tolist()


class Engine:
    """The pools of one engine, all its ranks in this process."""

    def __init__(
        self, backend: str, name: str, num_ranks: int, num_blocks: int, agents: ScriptedAgents | None
    ) -> None:
        self.num_ranks = num_ranks
        self.transports: list[StagingTransport] = []
        self.pools: list[torch.Tensor] = []
        shards = []
        for rank in range(num_ranks):
            transport: StagingTransport = NixlTransport(agents.make) if agents else create_transport(backend)
            shape = (num_blocks, LAYERS, 2, SLOTS, HEADS // num_ranks, DIM)
            self.pools.append(transport.allocate(shape, torch.float32, torch.device("cpu")))
            shards.append(Shard(f"{name}/{rank}", transport.serve(f"{name}/{rank}")))
            self.transports.append(transport)
        self.card = PeerMetadata(shards[0].sender, backend, LAYOUT, num_blocks, join_addresses(shards))
        self._closed = threading.Event()
        self._pump = threading.Thread(target=self._progress, daemon=True)
        self._pump.start()

    @property
    def kv(self) -> torch.Tensor:
        """With all heads."""
        return torch.cat(self.pools, dim=4)

    def fill(self, kv: torch.Tensor) -> None:
        for pool, part in zip(self.pools, kv.chunk(self.num_ranks, dim=4), strict=True):
            pool.copy_(part)

    def reader(self, rank: int, staging_bytes: int = STAGING_BYTES) -> ShardReader:
        return ShardReader(self.transports[rank], self.pools[rank], rank, self.num_ranks, staging_bytes)

    def close(self) -> None:
        self._closed.set()
        self._pump.join()
        for transport in self.transports:
            transport.close()

    def _progress(self) -> None:
        while not self._closed.wait(0.001):
            for transport in self.transports:
                transport.progress()


@contextlib.contextmanager
def engines(
    backend: str, theirs: int, ours: int, agents: ScriptedAgents | None = None
) -> Iterator[tuple[Engine, Engine]]:
    pair = (Engine(backend, "prefill", theirs, THEIRS, agents), Engine(backend, "decode", ours, OURS, agents))
    try:
        pair[0].fill(torch.randn(THEIRS, LAYERS, 2, SLOTS, HEADS, DIM))
        yield pair
    finally:
        for engine in pair:
            engine.close()


@pytest.mark.parametrize("backend", tuple(TRANSPORTS))
@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (2, 2), (4, 2), (1, 1)])
@pytest.mark.parametrize("staging", [STAGING_BYTES, 1], ids=["at once", "block by block"])
def test_blocks_arrive_bit_for_bit(backend: str, theirs: int, ours: int, staging: int) -> None:
    with engines(backend, theirs, ours) as (prefill, decode):
        before = decode.kv
        before[LOCAL] = prefill.kv[REMOTE]
        for rank in range(ours):
            decode.reader(rank, staging).read(prefill.card, BlockPairs.of(REMOTE, LOCAL), 10.0)
        assert torch.equal(decode.kv, before), "the blocks as they are there, all others untouched"


def test_a_card_of_several_ranks_is_read_back() -> None:
    shards = [Shard("a", b"1"), Shard("a/1", b"2")]
    card = PeerMetadata("a", "NIXL", LAYOUT, 3, join_addresses(shards))
    assert [(c.sender, c.address) for c in shards_of(card)] == [("a", b"1"), ("a/1", b"2")]
    assert shards_of(PeerMetadata("a", "NIXL", LAYOUT, 3, b"1"))[0].address == b"1"
    broken = PeerMetadata("a", "NIXL", LAYOUT, 3, join_addresses(shards)[:-1])
    with pytest.raises(KvTransferError, match="the metadata of a has an unreadable address"):
        shards_of(broken)


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused() -> None:
    card = PeerMetadata("a", "NIXL", LAYOUT, 3, join_addresses([Shard(f"a/{i}", b"") for i in range(3)]))
    reader = ShardReader(create_transport("SHARED_MEMORY"), torch.zeros(1), 0, 2)
    with pytest.raises(HandoffRefusedError, match="prefill has tensor_parallel_size 3, decode 2"):
        reader.read(card, BlockPairs.of([0], [0]), 1.0)


def test_a_read_that_never_ends_may_not_land_in_the_pool() -> None:
    """Its buffer is not used again before it has ended; the blocks are free to be."""
    agents = ScriptedAgents()
    with engines("NIXL", 1, 2, agents) as (prefill, decode):
        agent = agents["decode/0"]
        decode.reader(0).read(prefill.card, BlockPairs.of([0], [0]), 10.0)
        agent.state = "PROC"
        with pytest.raises(KvTransferError, match="took longer than") as caught:
            decode.reader(0).read(prefill.card, BlockPairs.of([1], [1]), 0.01)
        assert isinstance(caught.value.__cause__, ReadTimeoutError)
        agent.state = None
        agent.unending.append(agent.handle)
        decode.reader(0).read(prefill.card, BlockPairs.of([1], [1]), 10.0)
        pool, first, lost, last = agent.own_tables
        assert first == lost, "a buffer is used again"
        assert last not in (pool, lost)
        assert torch.equal(decode.pools[0][1], prefill.kv[1, :, :, :, : HEADS // 2])
