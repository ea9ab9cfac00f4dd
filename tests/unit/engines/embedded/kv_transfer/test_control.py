"""The sender's control channel, over real sockets."""

from __future__ import annotations

import logging
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.meeting import wait_until
from tests.support.strangers import as_stranger, require
from trtllm_disagg.common.machine import birth
from trtllm_disagg.engines.embedded.ipc import sockets
from trtllm_disagg.engines.embedded.ipc.sockets import VARIABLE, Listener, connect
from trtllm_disagg.engines.embedded.kv_transfer import control
from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout, PeerMetadata
from trtllm_disagg.engines.embedded.kv_transfer.control import (
    MAX_MESSAGE_BYTES,
    ControlClient,
    ControlServer,
    Finish,
    PeerGoneError,
)
from trtllm_disagg.engines.embedded.kv_transfer.pull import LeaseTable
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.wire.kv_handle import VERSION, KvHandle

METADATA = PeerMetadata("prefill-1", "SHARED_MEMORY", KvLayout("m", 4, 32, 2, 16, "float32"), 8, b"address")
SECONDS = 5.0
GET_METADATA = msgspec.msgpack.encode({"type": "card"})


class Server:
    def __init__(self, leases: LeaseTable | None = None) -> None:
        self.leases = LeaseTable(60.0) if leases is None else leases
        #: The engine was told of a lease that ended; it may be slow to listen.
        self.ended = threading.Event()
        self.listens = threading.Event()
        self.listens.set()
        self.control = ControlServer(self._tell)
        self.control.start(METADATA, self.leases.handlers())

    def _tell(self) -> None:
        self.listens.wait(2 * SECONDS)
        self.ended.set()

    def lease(self, request_id: int = 1) -> KvHandle:
        lease = self.leases.grant(request_id, [1, 2])
        handle = KvHandle(
            VERSION, METADATA.sender, self.control.endpoint, lease.id, b"y" * 16, b"p" * 16, 9, [1, 2], 0
        )
        lease.digest = handle.digest()
        return handle

    def connect(self) -> socket.socket:
        """As a peer does."""
        return connect(path_of(self), SECONDS)


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
    (length,) = struct.unpack("<I", receive(connection, 4))
    return receive(connection, length)


def receive(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size and (part := connection.recv(size - len(got))):
        got += part
    return got


def is_hung_up(connection: socket.socket) -> bool:
    """The server says nothing any more."""
    connection.settimeout(SECONDS)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_card_comes_as_it_was_given(server: Server, client: ControlClient) -> None:
    assert client.metadata(server.lease().endpoint, SECONDS) == METADATA


def test_confirming_ends_the_lease_and_wakes_the_engine(server: Server, client: ControlClient) -> None:
    handle = server.lease()
    assert client.finish(handle, SECONDS)
    assert server.ended.wait(SECONDS)
    assert len(server.leases) == 0
    assert not client.finish(handle, SECONDS)


def test_finish_is_answered_before_the_senders_engine_is_notified(
    server: Server, client: ControlClient
) -> None:
    server.listens.clear()
    assert client.finish(server.lease(), SECONDS)
    assert not server.ended.is_set()
    server.listens.set()
    assert server.ended.wait(SECONDS)


class SlowLeases(LeaseTable):
    def __init__(self) -> None:
        super().__init__(60.0)
        self.has_finished, self.goes_on = threading.Event(), threading.Event()

    def finish(self, lease_id: bytes, digest: bytes) -> bool:
        is_held = super().finish(lease_id, digest)
        self.has_finished.set()
        self.goes_on.wait(SECONDS)
        return is_held


def test_a_receiver_that_hangs_up_before_its_answer_wakes_the_senders_engine_all_the_same() -> None:
    leases = SlowLeases()
    server = Server(leases=leases)
    handle, connection = server.lease(), server.connect()
    question = msgspec.msgpack.encode(Finish(handle.lease, handle.digest()))
    connection.sendall(struct.pack("<I", len(question)) + question)
    assert leases.has_finished.wait(SECONDS)
    connection.close()
    leases.goes_on.set()
    assert server.ended.wait(SECONDS)
    server.control.close()


def test_a_changed_handle_is_not_confirmed_and_ends_nothing(server: Server, client: ControlClient) -> None:
    handle = server.lease()
    assert not client.finish(msgspec.structs.replace(handle, blocks=[1, 3]), SECONDS)
    assert len(server.leases) == 1
    assert client.finish(handle, SECONDS)


def test_no_peer_is_answered_after_close(server: Server, client: ControlClient) -> None:
    handle = server.lease()
    client.metadata(handle.endpoint, SECONDS)
    server.control.close()
    for _ in range(2):  # on the connection that was there, and on a new one
        with pytest.raises(KvTransferError, match="control channel"):
            client.finish(handle, SECONDS)
    with pytest.raises(PeerGoneError):
        client.finish(handle, SECONDS)
    assert len(server.leases) == 1


def test_connections_to_ended_peers_are_closed_when_another_peer_is_met(client: ControlClient) -> None:
    ended, stays, new = (Server() for _ in range(3))
    for server in (ended, stays):
        client.metadata(server.control.endpoint, SECONDS)
    ended.control.close()
    client.metadata(new.control.endpoint, SECONDS)
    assert list(client._connections) == [stays.control.endpoint, new.control.endpoint]
    assert (len(stays.control._connections), len(new.control._connections)) == (1, 1)
    for server in (stays, new):
        server.control.close()


def test_a_peer_for_which_there_is_no_thread_is_refused_and_the_next_one_served(
    server: Server, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(KvTransferError):
            client.metadata(server.control.endpoint, SECONDS)
    assert client.metadata(server.control.endpoint, SECONDS) == METADATA
    assert len(server.control._connections) == 1


def test_control_request_without_an_answer_times_out(client: ControlClient) -> None:
    with Listener("kv") as listener, pytest.raises(KvTransferError, match=r"no answer within 0\.1 s"):
        client.metadata(f"unix://{listener.path}", 0.1)


@pytest.mark.parametrize(
    "message", [b"", b"garbage", b"\x81\xa4type\xa3\xff\xff\xff", msgspec.msgpack.encode({"type": "x"})]
)
def test_an_unreadable_message_ends_its_connection_and_no_other(
    server: Server, client: ControlClient, message: bytes
) -> None:
    endpoint = server.lease().endpoint
    client.metadata(endpoint, SECONDS)
    with server.connect() as connection:
        connection.sendall(struct.pack("<I", len(message)) + message)
        assert is_hung_up(connection)
    assert client.metadata(endpoint, SECONDS) == METADATA


def test_invalid_messages_are_logged_once_a_minute(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with server.connect() as connection:
                connection.sendall(struct.pack("<I", 3) + b"bad")
                assert is_hung_up(connection)
    assert sum("hung up on" in record.message for record in caplog.records) == 1


def test_oversized_control_message_closes_the_connection(server: Server, client: ControlClient) -> None:
    with server.connect() as connection:
        connection.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
        assert is_hung_up(connection)
    assert client.metadata(server.lease().endpoint, SECONDS) == METADATA


def test_connection_beyond_the_limit_is_closed_until_another_one_ends(
    server: Server, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 3)
    held = [server.connect() for _ in range(3)]
    for connection in held:
        connection.settimeout(SECONDS)
        assert exchange(connection, GET_METADATA)
    with server.connect() as one_too_many:
        assert is_hung_up(one_too_many)
    for connection in held:
        connection.close()
    wait_until(lambda: len(server.control._connections) == 0)
    assert client.metadata(server.control.endpoint, SECONDS) == METADATA


def test_one_slow_peer_does_not_delay_another(server: Server, client: ControlClient) -> None:
    with server.connect() as slow:
        slow.sendall(b"\x10")
        assert client.metadata(server.lease().endpoint, SECONDS) == METADATA


def test_closing_leaves_no_thread(client: ControlClient) -> None:
    before = set(threading.enumerate())
    server = Server()
    client.metadata(server.lease().endpoint, SECONDS)
    server.control.close()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("kv-control"):
            thread.join(SECONDS)
            assert not thread.is_alive()


# -- the same user only, and only an engine's socket

_CONNECT = """
import json, socket, struct, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(10)
try:
    connection.connect(sys.argv[1])
    connection.sendall(struct.pack("<I", 10) + b"\\x81\\xa4type\\xa4card")
    got = connection.recv(1)
except OSError as error:
    got = b""
print(json.dumps(got.hex()))
"""


def path_of(server: Server) -> str:
    return server.control.endpoint.removeprefix("unix://")


def test_another_user_gets_no_answer_even_where_the_directory_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require()
    with tempfile.TemporaryDirectory(dir="/tmp") as where:
        monkeypatch.setenv(VARIABLE, where)
        server, client = Server(), ControlClient()
        try:
            assert as_stranger(_CONNECT, path_of(server)) == ""
            os.chmod(where, 0o711)
            os.chmod(path_of(server), 0o777)
            assert as_stranger(_CONNECT, path_of(server)) == ""
            assert len(server.control._connections) == 0
            os.chmod(where, 0o700)
            assert client.metadata(server.control.endpoint, SECONDS) == METADATA
        finally:
            client.close()
            server.control.close()


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:9",
        "unix:///run/docker.sock",
        "unix://{}/docker.sock",
        "unix://{}/../x/kv-1-1-00000000",
    ],
)
def test_forged_endpoint_is_not_connected_to(
    client: ControlClient, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, timeout: float) -> None:
        raise AssertionError(f"connected to {path}")

    monkeypatch.setattr(sockets, "connect", refuse)
    with pytest.raises(KvTransferError, match=r"is not in /.*one host only; use TensorRT-LLM"):
        client.metadata(endpoint.format(sockets.directory()), SECONDS)


def test_peer_with_a_deleted_socket_file_is_gone_only_when_its_process_has_ended(
    client: ControlClient,
) -> None:
    """It may still write into our blocks."""
    parent = os.getppid()
    for started, error in ((birth(parent), KvTransferError), (birth(parent) + 1, PeerGoneError)):
        endpoint = f"unix://{sockets.directory()}/kv-{parent}-{started}-00000000"
        with pytest.raises(KvTransferError) as refused:
            client.metadata(endpoint, SECONDS)
        assert type(refused.value) is error
