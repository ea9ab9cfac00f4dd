"""All transports on one host move the same blocks, and notice the same failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.pools import DIM, HEADS, LAYERS, SLOTS, Pool, pool_in_a_child
from trtllm_disagg.engines.embedded.kv_transfer.transports import TRANSPORTS
from trtllm_disagg.errors import KvTransferError

BLOCK_BYTES = LAYERS * 2 * SLOTS * HEADS * DIM * 4
MakePool = Callable[..., Pool]


@pytest.fixture(scope="module", params=tuple(TRANSPORTS))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pools(backend: str) -> Iterator[tuple[Pool, Pool]]:
    """(sender, receiver), of different sizes."""
    pair = Pool(backend, 8, "sender"), Pool(backend, 11, "receiver")
    yield pair
    for pool in pair:
        pool.close()


@pytest.fixture
def make_pool(backend: str) -> Iterator[MakePool]:
    made: list[Pool] = []

    def make(num_blocks: int = 8, name: str = "peer") -> Pool:
        made.append(Pool(backend, num_blocks, name))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.mark.parametrize("reads", [True, False], ids=["read", "written"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 10)), min_size=1, max_size=8))
def test_each_block_arrives_at_its_place_and_no_other_is_touched(
    pools: tuple[Pool, Pool], reads: bool, pairs: list[tuple[int, int]]
) -> None:
    peer, own = pools
    remote = list(dict.fromkeys(theirs for theirs, _ in pairs))
    local = list(dict.fromkeys(mine for _, mine in pairs))
    remote, local = remote[: len(local)], local[: len(remote)]
    (source, at), (target, to) = ((peer, remote), (own, local))[:: 1 if reads else -1]
    source.fill(1.0)
    target.kv.fill_(-1)
    expected = target.kv.clone()
    expected[to] = source.kv[at]
    move = own.read if reads else own.write
    assert move(peer.card, remote, local) == len(local) * BLOCK_BYTES
    assert torch.equal(target.kv, expected)


def test_forgotten_peer_can_be_read_again(pools: tuple[Pool, Pool]) -> None:
    sender, receiver = pools
    for _ in range(2):
        sender.fill(5.0)
        receiver.kv.zero_()
        receiver.read(sender.card, [7], [7])
        assert torch.equal(receiver.kv[7], sender.kv[7])
        receiver.transport.forget(sender.card)


def test_an_engine_can_read_from_itself(make_pool: MakePool) -> None:
    """A handoff that came back, to a worker that does both."""
    pool = make_pool()
    pool.fill(1.0)
    expected = pool.kv.clone()
    expected[[5, 2]] = pool.kv[[1, 0]]
    assert pool.read(pool.card, [1, 0], [5, 2]) == 2 * BLOCK_BYTES
    assert torch.equal(pool.kv, expected)
    expected[[4, 3]] = pool.kv[[1, 5]]
    assert pool.write(pool.card, [4, 3], [1, 5]) == 2 * BLOCK_BYTES
    assert torch.equal(pool.kv, expected)


def test_a_killed_sender_is_noticed_and_another_serves(backend: str, make_pool: MakePool) -> None:
    receiver = make_pool()
    with pool_in_a_child(backend) as (card, process):
        receiver.read(card, [1], [0])
        assert int(receiver.kv[0, 0, 0, 0, 0, 0]) == receiver.kv[0].numel()
        process.kill()
        process.wait()
        for _ in range(2):
            with pytest.raises(KvTransferError):
                receiver.read(card, [1], [0])
            with pytest.raises(KvTransferError):
                receiver.write(card, [1], [0])
    successor = make_pool(8, "successor")
    successor.fill(9.0)
    receiver.read(successor.card, [0], [0])
    assert torch.equal(receiver.kv[0], successor.kv[0])


@pytest.mark.parametrize("address", [b"", b"garbage", b"\x84\xa3pid\xff"])
def test_an_unreadable_address_is_an_error(pools: tuple[Pool, Pool], address: bytes) -> None:
    card = msgspec.structs.replace(pools[0].card, sender="stranger", address=address)
    with pytest.raises(KvTransferError, match="stranger"):
        pools[1].read(card, [0], [0])


def test_metadata_with_more_blocks_than_the_pool_raises_a_transfer_error(pools: tuple[Pool, Pool]) -> None:
    card = msgspec.structs.replace(pools[0].card, sender="liar", num_blocks=9)
    with pytest.raises(KvTransferError, match="liar"):
        pools[1].read(card, [8], [0])
