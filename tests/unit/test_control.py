"""The sender's control channel, over real sockets."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.base import PeerCard
from trtllm_disagg.kv_transfer.channel import MAX_MESSAGE_BYTES
from trtllm_disagg.kv_transfer.control import ControlClient, ControlServer
from trtllm_disagg.kv_transfer.handle import VERSION, KvHandle
from trtllm_disagg.kv_transfer.layout import KvLayout
from trtllm_disagg.kv_transfer.lease import LeaseTable

CARD = PeerCard("prefill-1", "SHARED_MEMORY", KvLayout("m", 4, 32, 2, 16, "float32"), 8, b"address")
SECONDS = 5.0


class Server:
    def __init__(self) -> None:
        self.leases = LeaseTable(60.0)
        self.ended = threading.Event()
        self.control = ControlServer("127.0.0.1", self.leases, self.ended.set)
        self.control.start(CARD)
        self.address = ("127.0.0.1", int(self.control.endpoint.rpartition(":")[2]))

    def lease(self, request_id: int = 1) -> KvHandle:
        lease = self.leases.grant(request_id, [1, 2])
        handle = KvHandle(
            VERSION, CARD.sender, self.control.endpoint, lease.id, b"y" * 16, b"p" * 16, 9, [1, 2], 0
        )
        lease.digest = handle.digest()
        return handle


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.control.close()


@pytest.fixture
def client() -> Iterator[ControlClient]:
    made = ControlClient()
    yield made
    made.close()


def exchange(connection: socket.socket, payload: bytes) -> bytes:
    connection.sendall(struct.pack("<I", len(payload)) + payload)
    (length,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
    return connection.recv(length, socket.MSG_WAITALL)


def test_a_card_comes_as_it_was_given(server: Server, client: ControlClient) -> None:
    assert client.card(server.lease().endpoint, SECONDS) == CARD


def test_confirming_ends_the_lease_and_wakes_the_engine(server: Server, client: ControlClient) -> None:
    handle = server.lease()
    assert client.confirm(handle, SECONDS)
    assert server.ended.is_set()
    assert len(server.leases) == 0
    assert not client.confirm(handle, SECONDS)


def test_a_changed_handle_is_not_confirmed_and_ends_nothing(server: Server, client: ControlClient) -> None:
    handle = server.lease()
    assert not client.confirm(msgspec.structs.replace(handle, blocks=[1, 3]), SECONDS)
    assert len(server.leases) == 1
    assert client.confirm(handle, SECONDS)


def test_beginning_tells_whether_there_is_something_to_read(server: Server, client: ControlClient) -> None:
    handle = server.lease()
    assert client.begin(handle, SECONDS)
    assert len(server.leases) == 1
    assert not client.begin(msgspec.structs.replace(handle, blocks=[1, 3]), SECONDS)
    assert client.confirm(handle, SECONDS)
    assert not client.begin(handle, SECONDS)


def test_beginning_too_late_is_told_apart_from_a_wrong_handle(server: Server, client: ControlClient) -> None:
    server.leases.seconds = 0.0
    with pytest.raises(KvTransferError, match="ended before the KV was read"):
        client.begin(server.lease(), SECONDS)


def test_releasing_ends_the_lease(server: Server, client: ControlClient) -> None:
    client.release(server.lease(), SECONDS)
    assert len(server.leases) == 0
    assert server.ended.is_set()


def test_nobody_is_answered_after_close_whoever_is_connected(server: Server, client: ControlClient) -> None:
    handle = server.lease()
    client.card(handle.endpoint, SECONDS)
    server.control.close()
    for _ in range(2):  # on the connection that was there, and on a new one
        with pytest.raises(KvTransferError, match="control channel"):
            client.confirm(handle, SECONDS)
    assert len(server.leases) == 1


def test_a_client_connects_again_after_its_connection_broke(server: Server, client: ControlClient) -> None:
    handle = server.lease()
    client.card(handle.endpoint, SECONDS)
    client._channel._connections[handle.endpoint].shutdown(socket.SHUT_RDWR)
    with pytest.raises(KvTransferError):
        client.card(handle.endpoint, SECONDS)
    assert client.card(handle.endpoint, SECONDS) == CARD


def test_silence_is_an_error_after_the_deadline(client: ControlClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        handle = msgspec.structs.replace(HANDLE, endpoint=f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(KvTransferError, match=r"no answer within 0\.1 s"):
            client.confirm(handle, 0.1)


HANDLE = KvHandle(VERSION, "s", "tcp://127.0.0.1:1", b"l" * 16, b"y" * 16, b"p" * 16, 1, [0], 0)


@pytest.mark.parametrize(
    "message", [b"", b"garbage", b"\x81\xa4type\xa3\xff\xff\xff", msgspec.msgpack.encode({"type": "x"})]
)
def test_an_unreadable_message_is_answered_and_the_connection_goes_on(server: Server, message: bytes) -> None:
    with socket.create_connection(server.address, timeout=SECONDS) as connection:
        assert exchange(connection, message) == b"bad"
        card = exchange(connection, msgspec.msgpack.encode({"type": "card"}))
        assert msgspec.msgpack.decode(card, type=PeerCard) == CARD


def test_a_message_without_end_is_not_waited_for(server: Server, client: ControlClient) -> None:
    with socket.create_connection(server.address, timeout=SECONDS) as connection:
        connection.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
        assert connection.recv(1) == b"", "the server hangs up"
    assert client.card(server.lease().endpoint, SECONDS) == CARD


def test_one_slow_peer_does_not_delay_another(server: Server, client: ControlClient) -> None:
    with socket.create_connection(server.address) as slow:
        slow.sendall(b"\x10")
        assert client.card(server.lease().endpoint, SECONDS) == CARD


def test_closing_leaves_no_thread(server: Server, client: ControlClient) -> None:
    client.card(server.lease().endpoint, SECONDS)
    server.control.close()
    for thread in threading.enumerate():
        if thread.name.startswith("kv-control"):
            thread.join(SECONDS)
            assert not thread.is_alive()


def test_an_ipv6_address_is_shown_in_brackets() -> None:
    server = ControlServer("::1", LeaseTable(1.0), lambda: None)
    try:
        assert server.endpoint.startswith("tcp://[::1]:")
        server.start(CARD)
        client = ControlClient()
        handle = msgspec.structs.replace(HANDLE, endpoint=server.endpoint)
        assert client.card(handle.endpoint, SECONDS) == CARD
        client.close()
    finally:
        server.close()
