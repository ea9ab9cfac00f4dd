"""A decode engine asks after the prefills that it waits for; what it knows of their engine outlives an old answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event

import msgspec
import pytest

from tests.support.fake_transport import FakeTransport
from trtllm_disagg.engines.embedded.ipc.sockets import directory
from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout, KvTimeouts, PeerMetadata
from trtllm_disagg.engines.embedded.kv_transfer.connections import PeerConnections, PeerMetadataCache
from trtllm_disagg.engines.embedded.kv_transfer.control import (
    ControlClient,
    ControlServer,
    FromDecode,
    FromPrefill,
    Notice,
    Offer,
    Reply,
    Watch,
    Withdraw,
    new_ticket,
)
from trtllm_disagg.engines.embedded.kv_transfer.push import Expected, PushReceiver

ENDPOINT = "prefill"
#: Of a process that has ended.
GONE = f"unix://{directory()}/kv-1-1-00000000"
LAYOUT = KvLayout("model", 1, 16, 1, 8, "float32")
METADATA = PeerMetadata("engine", "NIXL", LAYOUT, 4, b"")


class ScriptedConnections(PeerConnections):
    """The prefill engine takes every offer, and says of all tickets that they are not open. With `is_done` it sends
    its notice while it is being asked.
    """

    def __init__(self, is_done: bool) -> None:
        super().__init__(FakeTransport(), LAYOUT, timeouts=KvTimeouts(ask=0.01), on_change=lambda: None)
        self.metadata.known[ENDPOINT] = METADATA
        self.receiver = PushReceiver(self, on_news=lambda: None, on_busy=lambda: None)
        self.answered = Event()
        self._is_done = is_done

    def send(self, endpoint: str, message: FromDecode | FromPrefill) -> bytes:
        if not isinstance(message, Watch):
            return b"ok"
        if self._is_done:
            for ticket in message.tickets:
                assert self.receiver.noticed(Notice(ticket, 1, None, 0, 0, 0)) == b"taken"
        self.answered.set()
        return msgspec.msgpack.encode(message.tickets)

    def close(self) -> None:
        self.receiver.close()
        super().close()


@pytest.fixture
def peers(request: pytest.FixtureRequest) -> Iterator[ScriptedConnections]:
    made = ScriptedConnections(is_done=request.param)
    yield made
    made.close()


class LostPrefill(PeerConnections):
    """The prefill engine has taken the offer, and nothing listens at its endpoint any more."""

    def __init__(self, endpoint: str, dead: float = 0.5) -> None:
        timeouts, self.changed = KvTimeouts(ask=0.01, dead=dead), Event()
        super().__init__(FakeTransport(), LAYOUT, timeouts=timeouts, on_change=self.changed.set)
        self.metadata.known[endpoint] = METADATA
        self.receiver = PushReceiver(self, on_news=self.changed.set, on_busy=lambda: None)
        self.endpoint = endpoint

    def send(self, endpoint: str, message: FromDecode | FromPrefill) -> bytes:
        return b"ok" if isinstance(message, Offer) else super().send(endpoint, message)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self.changed.wait(30)
            self.changed.clear()

    def close(self) -> None:
        self.receiver.close()
        super().close()


def expected_from(endpoint: str) -> Expected:
    offer = Offer(
        request=1,
        ticket=new_ticket(),
        endpoint="here",
        layout=LAYOUT.fingerprint(),
        prompt=b"p" * 16,
        blocks=[0],
        num_known=0,
        seconds=30.0,
    )
    return Expected(endpoint=endpoint, offer=offer)


def test_a_dead_writers_blocks_are_free_at_once() -> None:
    peers = LostPrefill(GONE)
    try:
        expected = expected_from(GONE)
        peers.receiver.expect(expected)
        peers.wait_for(lambda: expected.error is not None)
        assert "is gone" in str(expected.error)
        late = peers.receiver.give_up(expected)
        assert late is not None
        peers.wait_for(lambda: late.ended)
        assert peers.late.take_news() == [late]
    finally:
        peers.close()


class SlowMetadata(PeerMetadataCache):
    """It comes when the test says so."""

    def __init__(self, client: ControlClient) -> None:
        super().__init__(client, lambda metadata: None, 5.0)
        self.asked, self.comes = Event(), Event()

    def of(self, endpoint: str) -> PeerMetadata:
        self.asked.set()
        assert self.comes.wait(20)
        return super().of(endpoint)


def test_blocks_given_up_before_their_offer_was_sent_stay_apart_while_a_live_prefill_writes() -> None:
    server = ControlServer(lambda: None)
    server.start(METADATA, {Withdraw: lambda message: Reply.BUSY})
    peers = LostPrefill(server.endpoint, dead=0.0)
    peers.metadata = slow = SlowMetadata(peers.client)
    try:
        expected = expected_from(server.endpoint)
        peers.receiver.expect(expected)
        assert slow.asked.wait(20)
        late = peers.receiver.give_up(expected)
        slow.comes.set()
        assert peers.changed.wait(30)
        assert late is not None
        assert peers.late.take_news() == [late]
        assert expected.is_offered
        assert not late.ended
    finally:
        peers.close()
        server.close()


def expect_one(peers: ScriptedConnections) -> Expected:
    expected = expected_from(ENDPOINT)
    peers.receiver.expect(expected)
    assert peers.answered.wait(30)
    # What comes next on the peer's thread comes behind the answer.
    behind = Event()
    peers.threads.submit(ENDPOINT, behind.set)
    assert behind.wait(30)
    return expected


@pytest.mark.parametrize("peers", [True], indirect=True)
def test_an_answer_about_a_prefill_that_has_ended_meanwhile_drops_no_metadata(
    peers: ScriptedConnections,
) -> None:
    expected = expect_one(peers)
    assert expected.notice is not None
    assert expected.error is None
    assert peers.metadata.known == {ENDPOINT: METADATA}


@pytest.mark.parametrize("peers", [False], indirect=True)
def test_request_that_prefill_has_forgotten_fails_and_drops_its_metadata(peers: ScriptedConnections) -> None:
    expected = expect_one(peers)
    assert expected.error is not None
    assert "ended this request without a notice or a failure message" in str(expected.error)
    assert peers.metadata.known == {}
