"""KV over TLS: what moves, what is refused, and that nothing lands late."""

from __future__ import annotations

import contextlib
import glob
import signal
import socket
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clock import Clock
from tests.support.meeting import wait_until
from tests.support.pools import LAYOUT, NETWORK, ONE_HOST, Pool, pool_in_a_child
from trtllm_disagg.engines.embedded.kv_transfer.access import Network
from trtllm_disagg.engines.embedded.kv_transfer.base import PeerMetadata, ReadTimeoutError, runs_of
from trtllm_disagg.engines.embedded.kv_transfer.tls import Fetch, Stop, Store, TlsTransport
from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport
from trtllm_disagg.errors import ConfigError, KvTransferError
from trtllm_disagg.processes.framing import framed, receive_frame
from trtllm_disagg.wire.kv_handle import split_endpoint


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[Pool, Pool]]:
    pair = Pool("TLS", 8, "sender", NETWORK), Pool("TLS", 12, "receiver", NETWORK)
    yield pair
    for pool in pair:
        pool.close()


@given(st.lists(st.integers(0, 50)))
def test_runs_cover_every_block_in_order(blocks: list[int]) -> None:
    runs = runs_of(np.asarray(blocks, np.int32))
    assert [block for run in runs for block in range(run.start, run.stop)] == blocks


def test_blocks_are_read_and_written_in_any_order(pools: tuple[Pool, Pool]) -> None:
    sender, receiver = pools
    sender.fill(1.0)
    receiver.kv.zero_()
    moved = receiver.read(sender.card, [7, 1, 2, 3], [0, 5, 6, 11])
    assert torch.equal(receiver.kv[[0, 5, 6, 11]], sender.kv[[7, 1, 2, 3]])
    assert not receiver.kv[[1, 2, 3, 4, 7, 8, 9, 10]].any()
    receiver.fill(500.0)
    assert receiver.write(sender.card, [4, 5, 0], [9, 10, 2]) == moved * 3 // 4
    assert torch.equal(sender.kv[[4, 5, 0]], receiver.kv[[9, 10, 2]])


def test_a_block_beyond_the_pool_is_refused_and_the_next_read_works(pools: tuple[Pool, Pool]) -> None:
    sender, receiver = pools
    for block in (8, -1):
        with pytest.raises(KvTransferError, match=r"sender refused: block ids are outside of \[0, 8\)"):
            receiver.read(sender.card, [0, block], [0, 1])
        with pytest.raises(KvTransferError):
            receiver.write(sender.card, [0, block], [0, 1])
    assert receiver.read(sender.card, [0], [0])


def test_blocks_of_another_size_are_refused(pools: tuple[Pool, Pool]) -> None:
    sender, receiver = pools
    assert isinstance(receiver.transport, TlsTransport)
    with (
        pytest.raises(KvTransferError, match="blocks of 4 bytes were asked for"),
        receiver.transport.fetched(sender.card, np.asarray([0], np.int32), 4, 5.0),
    ):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    "message",
    [
        b"garbage",
        msgspec.msgpack.encode(Fetch(b"12345", 1536)),
        msgspec.msgpack.encode(Store(b"t" * 16, b"", 1536)),
        msgspec.msgpack.encode(Stop(b"short")),
        b"\x81\xa4type\xa4card",
    ],
)
def test_invalid_control_message_closes_the_connection(pools: tuple[Pool, Pool], message: bytes) -> None:
    sender, _ = pools
    with NETWORK.authentication().connect(sender.card.address.decode(), 5.0) as connection:
        connection.settimeout(5.0)
        connection.sendall(framed(message))
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert b"ok" not in answer


def test_a_peer_without_the_key_reads_nothing(pools: tuple[Pool, Pool]) -> None:
    sender, _ = pools
    stranger = Pool("TLS", 8, "stranger", Network("127.0.0.1", b"another key" * 4))
    with pytest.raises(KvTransferError):
        stranger.read(sender.card, [0], [0])
    assert not stranger.kv.any()
    stranger.close()


def test_a_read_of_a_stopped_peer_times_out_and_lands_never() -> None:
    with pool_in_a_child("TLS", "network") as (card, process):
        receiver, writer = (Pool("TLS", 8, f"late-{name}", NETWORK) for name in ("reader", "writer"))
        receiver.read(card, [0], [0])
        writer.write(card, [1], [1])
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        receiver.kv.zero_()
        with pytest.raises(ReadTimeoutError, match=r"took longer than 0\.2 s") as timeout:
            receiver.read(card, [3, 4], [5, 6], timeout=0.2)
        assert not timeout.value.may_land_later
        with pytest.raises(ReadTimeoutError) as timeout:
            writer.write(card, [3, 4], [5, 6], timeout=0.2)
        assert timeout.value.may_land_later
        late_write = timeout.value
        with pytest.raises(ReadTimeoutError, match="writing KV to") as timeout:
            writer.write(card, [3, 4], [5, 6], timeout=0.2)
        assert not timeout.value.may_land_later, "its new connection was not accepted"
        process.send_signal(signal.SIGCONT)
        assert receiver.read(card, [0], [0])
        assert not receiver.kv[5:7].any()
        wait_until(late_write.has_ended)
        process.kill()
        process.wait()
        with pytest.raises(KvTransferError):
            receiver.read(card, [0], [0])
        receiver.close()
        writer.close()


def begin_store(pool: Pool, ticket: bytes) -> socket.socket:
    """A connection of a writer that has sent the first bytes of block 2, and not yet the others."""
    connection = NETWORK.authentication().connect(pool.card.address.decode(), 5.0)
    connection.settimeout(5.0)
    block_bytes = pool.kv[0].numel() * 4
    connection.sendall(framed(msgspec.msgpack.encode(Store(ticket, np.int32(2).tobytes(), block_bytes))))
    connection.sendall(torch.full((2,), 7.0).numpy().tobytes())
    return connection


def stop_store(pool: Pool, ticket: bytes) -> bytes:
    with NETWORK.authentication().connect(pool.card.address.decode(), 5.0) as connection:
        connection.sendall(framed(msgspec.msgpack.encode(Stop(ticket))))
        return receive_frame(connection, seconds=5.0, max_bytes=100)


def test_a_store_that_its_writer_gave_up_is_stopped_in_the_middle(pools: tuple[Pool, Pool]) -> None:
    owner, _ = pools
    owner.kv.zero_()
    with begin_store(owner, b"t" * 16) as connection:
        wait_until(lambda: bool(owner.kv[2].flatten()[1] == 7.0))
        assert stop_store(owner, b"t" * 16) == b"ok"
        with contextlib.suppress(OSError):
            connection.sendall(torch.full((2,), 8.0).numpy().tobytes())
        with contextlib.suppress(OSError):
            assert not connection.recv(1), "the owner has hung up"
    assert owner.kv[2].flatten()[:3].tolist() == [7.0, 7.0, 0.0]


def test_a_store_that_comes_after_its_end_is_refused(pools: tuple[Pool, Pool]) -> None:
    owner, _ = pools
    owner.kv.zero_()
    assert stop_store(owner, b"u" * 16) == b"ok"
    with begin_store(owner, b"u" * 16) as connection:
        answer = receive_frame(connection, seconds=5.0, max_bytes=100)
    assert answer == b"the writer has given up on this store"
    assert not owner.kv.any()


def test_connections_to_peers_of_long_ago_are_closed_when_another_peer_is_met() -> None:
    clock = Clock()
    reader = Pool("TLS", 8, "reader", transport=TlsTransport(NETWORK, clock))
    old, new = (Pool("TLS", 8, name, NETWORK) for name in ("old", "new"))
    reader.read(old.card, [0], [0])
    assert is_connected(old)
    clock.now = 100.0
    reader.read(new.card, [0], [0])
    assert (is_connected(old), is_connected(new)) == (False, True)
    for pool in (reader, old, new):
        pool.close()


def is_connected(sender: Pool) -> bool:
    """This process has a connection to that pool."""
    place = split_endpoint(sender.card.address.decode())
    return any(
        connection.raddr == place and connection.status == psutil.CONN_ESTABLISHED
        for connection in psutil.Process().net_connections("tcp")
    )


def test_default_is_tls_between_hosts_and_tls_is_refused_on_one_host() -> None:
    chosen = create_transport("DEFAULT", NETWORK)
    has_rdma = bool(glob.glob("/sys/class/infiniband/*"))
    assert chosen.name == ("NIXL" if has_rdma else "TLS")
    chosen.close()
    with pytest.raises(ConfigError, match=r"cache_transceiver_config\.backend: 'TLS'"):
        create_transport("TLS", ONE_HOST)
    with pytest.raises(ConfigError, match="NIXL on a CUDA device"):
        create_transport("TLS", NETWORK).allocate((1, 2, 1, 1, 1, 1), torch.float32, torch.device("cuda"))


_RECORD_BYTES = 1 << 14


@contextlib.contextmanager
def peer_on_a_slow_link(seconds: float) -> Iterator[PeerMetadata]:
    """A peer that answers one read, and then takes so many seconds for each record of its blocks."""
    authentication = NETWORK.authentication()
    listener, endpoint = authentication.listen()
    closed = threading.Event()

    def serve() -> None:
        accepted, _ = listener.accept()
        connection, _ = authentication.screen(accepted)
        with connection, contextlib.suppress(OSError):
            authentication.greet(connection)
            receive_frame(connection, seconds=5.0, max_bytes=1 << 20)
            connection.sendall(framed(b"ok"))
            while not closed.wait(seconds):
                connection.sendall(bytes(_RECORD_BYTES))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        yield PeerMetadata("slow", "TLS", LAYOUT, 2, endpoint.encode())
        closed.set()
        thread.join(timeout=5)


def test_a_read_over_a_slow_link_ends_at_its_timeout() -> None:
    reader = TlsTransport(NETWORK)
    reader.allocate((2, 1, 2, 1, 1, 16 * _RECORD_BYTES // 8), torch.float32, torch.device("cpu"))
    block = np.zeros(1, np.int32)
    with peer_on_a_slow_link(0.2) as peer, pytest.raises(ReadTimeoutError, match=r"took longer than 0\.5 s"):
        reader.read(peer, block, block, 0.5)
    reader.close()
