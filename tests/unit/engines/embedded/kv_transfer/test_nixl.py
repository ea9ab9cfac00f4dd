"""What only the NIXL transport does: its timeouts, its peers, and the backend that stands in for it."""

from __future__ import annotations

import itertools
import math
import os
import queue
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from nixl_cu13._api import nixl_agent

from tests.support.fake_transport import WaitsFor
from tests.support.meeting import wait_until
from tests.support.nixl_agents import ScriptedAgents
from tests.support.pools import DIM, HEADS, LAYERS, LAYOUT, SLOTS, Pool, TcpTransport, pool_in_a_child
from trtllm_disagg.common import machine as proc_stat
from trtllm_disagg.common.machine import ProcessMark
from trtllm_disagg.engines.embedded.kv_transfer.base import KvTimeouts, PeerMetadata, ReadTimeoutError
from trtllm_disagg.engines.embedded.kv_transfer.connections import PeerConnections
from trtllm_disagg.engines.embedded.kv_transfer.nixl import NixlAddress, NixlTransport
from trtllm_disagg.errors import ConfigError, KvTransferError


@pytest.fixture(scope="module")
def agents() -> ScriptedAgents:
    return ScriptedAgents()


@pytest.fixture(scope="module")
def pools(agents: ScriptedAgents) -> Iterator[tuple[Pool, Pool]]:
    sender, receiver = (
        Pool("NIXL", 8, name, transport=NixlTransport(agents.make)) for name in ("sender", "receiver")
    )
    yield sender, receiver
    for pool in (sender, receiver):
        pool.close()


@pytest.fixture(autouse=True)
def unscripted(agents: ScriptedAgents) -> Iterator[None]:
    yield
    for agent in agents.values():
        agent.state = agent.failure = None


def test_read_beyond_its_timeout_raises_with_may_land_later(
    pools: tuple[Pool, Pool], agents: ScriptedAgents
) -> None:
    sender, receiver = pools
    agents["receiver"].state = "PROC"
    with pytest.raises(ReadTimeoutError, match=r"sender took longer than 0\.0 s") as timeout:
        receiver.read(sender.card, [0], [0], timeout=0.01)
    assert timeout.value.may_land_later
    agents["receiver"].state = None
    wait_until(timeout.value.has_ended)


def test_a_read_that_ends_badly_is_an_error_and_drops_the_peer(
    pools: tuple[Pool, Pool], agents: ScriptedAgents
) -> None:
    sender, receiver = pools
    agent = agents["receiver"]
    receiver.read(sender.card, [0], [0])
    agent.state = "ERR"
    with pytest.raises(KvTransferError, match="reading KV from sender failed"):
        receiver.read(sender.card, [0], [0])
    agent.state, known = None, agent.num_added
    receiver.read(sender.card, [0], [0])
    assert agent.num_added == known + 1


def test_a_peer_is_connected_once(pools: tuple[Pool, Pool], agents: ScriptedAgents) -> None:
    sender, receiver = pools
    receiver.transport.forget(sender.card)
    known = agents["receiver"].num_added
    for _ in range(3):
        receiver.read(sender.card, [0], [0])
    assert agents["receiver"].num_added == known + 1


def test_a_card_with_the_metadata_of_another_agent_is_refused(pools: tuple[Pool, Pool]) -> None:
    sender, receiver = pools
    receiver.transport.forget(sender.card)
    card = msgspec.structs.replace(sender.card, sender="impostor")
    with pytest.raises(KvTransferError, match="the metadata of impostor belongs to sender"):
        receiver.read(card, [0], [0])
    receiver.read(sender.card, [0], [0])


def test_a_peer_that_fails_while_it_connects_does_not_end_the_service(
    pools: tuple[Pool, Pool], agents: ScriptedAgents
) -> None:
    sender, _ = pools
    agents["sender"].failure = ZeroDivisionError()
    sender.transport.progress()


def test_one_peers_copy_is_over_before_another_peers_handle_is_released(agents: ScriptedAgents) -> None:
    """NIXL's call to release a handle waits for the copy and keeps Python's global lock, which stops the engine. That
    call comes first here: any other one would wait in its place.
    """
    near, far = Pool("NIXL", 8, "near"), Pool("NIXL", 8, "far")
    reader = Pool("NIXL", 8, "reader", transport=NixlTransport(agents.make))
    agent, held = agents["reader"], WaitsFor()

    try:
        reader.read(far.card, [0], [1])
        with ThreadPoolExecutor(2) as threads:
            agent.held = held
            first = threads.submit(reader.read, near.card, [0], [0])
            assert held.begun.wait(20)
            second = threads.submit(reader.transport.forget, far.card)
            with pytest.raises(queue.Empty):
                agent.asked_meanwhile.get(timeout=0.3)
            held.go.set()
            assert first.result(20) > 0
            second.result(20)
        assert agent.forgotten == ["far"]
    finally:
        held.go.set()
        for pool in (near, far, reader):
            pool.close()


def test_a_restarted_peers_predecessor_is_forgotten_when_the_next_peer_is_met(agents: ScriptedAgents) -> None:
    reader = Pool("NIXL", 8, "long-lived", transport=NixlTransport(agents.make))
    with pool_in_a_child("NIXL") as (card, process):
        reader.read(card, [0], [0])
        process.kill()
        process.wait()
    successor = Pool("NIXL", 8, "successor")
    reader.read(successor.card, [0], [0])
    assert agents["long-lived"].forgotten == [card.sender]
    for pool in (reader, successor):
        pool.close()


def in_process(card: PeerMetadata, process: ProcessMark) -> PeerMetadata:
    """The card, as if that process had made it."""
    address = msgspec.msgpack.decode(card.address, type=NixlAddress)
    address = msgspec.structs.replace(address, process=process)
    return msgspec.structs.replace(card, address=msgspec.msgpack.encode(address))


def test_a_peer_may_be_met_while_another_peers_thread_looks_for_peers_that_have_ended(
    agents: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, met, meets = (Pool("NIXL", 8, name) for name in ("known", "met-meanwhile", "meets"))
    reader = Pool("NIXL", 8, "meets-two", transport=NixlTransport(agents.make))
    parent, birth = os.getppid(), proc_stat.birth
    reader.read(in_process(known.card, ProcessMark(parent, birth(parent))), [0], [0])
    looks = itertools.count()

    def look(pid: int) -> int:
        if pid == parent and next(looks) == 0:
            reader.read(met.card, [0], [1])
        return birth(pid)

    monkeypatch.setattr(proc_stat, "birth", look)
    reader.read(meets.card, [0], [2])
    assert agents["meets-two"].num_added == 3
    for pool in (known, met, meets, reader):
        pool.close()


def test_an_ended_peer_is_forgotten_only_after_the_transfer_with_it(
    agents: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, second, third = (Pool("NIXL", 8, name) for name in ("ends", "second", "third"))
    reader = Pool("NIXL", 8, "reads-from-an-ended-one", transport=NixlTransport(agents.make))
    parent, birth = os.getppid(), proc_stat.birth
    agent, held = agents["reads-from-an-ended-one"], WaitsFor()
    agent.state, agent.held = "PROC", held
    card = in_process(ends.card, ProcessMark(parent, birth(parent)))
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(reader.read, card, [0], [0], 20.0)
        assert held.begun.wait(20)
        held.go.set()
        monkeypatch.setattr(proc_stat, "birth", lambda pid: 0 if pid == parent else birth(pid))
        with pytest.raises(ReadTimeoutError):
            reader.read(second.card, [0], [1], timeout=0.01)
        forgotten_meanwhile = list(agent.forgotten)
        agent.state = None
        assert reading.result(20) > 0
    assert forgotten_meanwhile == []
    reader.read(third.card, [0], [2])
    assert agent.forgotten == ["ends"]
    for pool in (ends, second, third, reader):
        pool.close()


def test_fetches_of_all_sizes_use_one_buffer(agents: ScriptedAgents) -> None:
    sender = Pool("NIXL", 8, "giver")
    reader = Pool("NIXL", 8, "fetcher", transport=NixlTransport(agents.make))
    bytes_of_block = reader.kv[0].nbytes
    agents["fetcher"].own_tables.clear()
    for count in (1, 4, 8):
        with reader.transport.fetched(sender.card, np.arange(count), bytes_of_block, 10.0):
            pass
    assert len(set(agents["fetcher"].own_tables)) == 1
    for pool in (sender, reader):
        pool.close()


def test_a_pool_that_ucx_cannot_have_is_refused_by_name() -> None:
    class Refusing(nixl_agent):  # type: ignore[misc]
        def register_memory(self, *args: Any) -> Any:
            raise RuntimeError("NIXL_ERR_BACKEND")

    transport = NixlTransport(Refusing)
    transport.allocate((4, 1, 2, 4, 2, 8), torch.float32, torch.device("cpu"))
    expected = "'NIXL' is not allowed; expected memory that UCX can register, 2048 bytes of the CPU: NIXL_ERR_BACKEND"
    with pytest.raises(ConfigError, match=expected):
        transport.serve("refused")
    transport.close()


# -- a read that lands late


Late = tuple[Pool, "subprocess.Popen[bytes]", ReadTimeoutError]


@pytest.fixture
def late() -> Iterator[Late]:
    """A receiver with a read of two blocks that a stopped sender has not answered in time, over tcp."""
    with pool_in_a_child("NIXL", "tcp") as (card, process):
        receiver = Pool("NIXL", 8, "late-receiver", TcpTransport())
        receiver.read(card, [0], [0])
        stop(process)
        with pytest.raises(ReadTimeoutError) as timeout:
            receiver.read(card, [3, 4], [5, 6], timeout=0.2)
        yield receiver, process, timeout.value
        receiver.close()


def test_a_late_read_has_ended_when_its_bytes_are_there(late: Late) -> None:
    """Over tcp a stopped sender answers when it goes on, however long that takes."""
    receiver, process, timeout = late
    assert timeout.may_land_later
    assert not timeout.has_ended()
    assert not receiver.kv[5:7].any()
    process.send_signal(signal.SIGCONT)
    wait_until(timeout.has_ended)
    assert torch.equal(receiver.kv[5:7], filled(8)[3:5])
    assert timeout.has_ended(), "asked again"


def test_a_late_read_ends_although_the_next_pull_from_that_peer_fails() -> None:
    """A peer with a late transfer is not forgotten: NIXL would say nothing more of that transfer."""
    endpoint = "tcp://127.0.0.1:1"
    with pool_in_a_child("NIXL", "tcp") as (card, process):
        receiver = Pool("NIXL", 8, "late-receiver-3", TcpTransport())
        peers = PeerConnections(
            receiver.transport, LAYOUT, timeouts=KvTimeouts(control=0.2), on_change=lambda: None
        )
        peers.metadata.known[endpoint] = card
        receiver.read(card, [0], [0])
        stop(process)

        def read() -> None:
            receiver.read(card, [3, 4], [5, 6], timeout=0.2)

        slow = peers.attempt(endpoint, read)
        assert slow.late is not None

        def refused() -> None:
            peers.metadata.known[endpoint] = card
            raise KvTransferError("the lease ended before the KV was read")

        assert peers.attempt(endpoint, refused).error is not None
        process.send_signal(signal.SIGCONT)
        wait_until(slow.late.has_ended)
        assert torch.equal(receiver.kv[5:7], filled(8)[3:5])
        receiver.transport.forget(card)
        assert receiver.read(card, [1], [1])
        peers.close()
        receiver.close()


def test_the_buffers_of_late_fetches_are_used_again() -> None:
    """Each has 16 MiB, and a slow link makes one after the other."""
    with pool_in_a_child("NIXL", "tcp") as (card, process):
        receiver = Pool("NIXL", 8, "late-fetcher", TcpTransport())
        size, addresses = receiver.kv[0].nbytes, set[int]()

        def fetch(block: int, timeout: float) -> None:
            blocks = np.array([block], np.int32)
            with receiver.transport.fetched(card, blocks, size, timeout) as got:
                assert got.any()
                addresses.add(got.ctypes.data)

        fetch(1, 5.0)
        for _ in range(4):
            stop(process)
            with pytest.raises(ReadTimeoutError) as timeout:
                fetch(2, 0.2)
            process.send_signal(signal.SIGCONT)
            wait_until(timeout.value.has_ended)
            fetch(3, 5.0)
        assert len(addresses) <= 2
        receiver.close()


def test_a_late_read_of_a_sender_that_died_has_not_ended_by_itself(late: Late) -> None:
    _, process, timeout = late
    process.kill()
    process.wait()
    assert not any(timeout.has_ended() for _ in range(100))


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


def filled(num_blocks: int) -> torch.Tensor:
    shape = (num_blocks, LAYERS, 2, SLOTS, HEADS, DIM)
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
