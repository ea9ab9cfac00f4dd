"""A decode engine asks after the prefills that it waits for; what it knows of their engine outlives an old answer."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import msgspec
import pytest

from trtllm_disagg.kv_transfer.access import OneHost
from trtllm_disagg.kv_transfer.base import KvLayout, KvTimeouts, PeerMetadata
from trtllm_disagg.kv_transfer.messages import FromDecode, FromPrefill, Notice, Watch
from trtllm_disagg.kv_transfer.peers import Peers
from trtllm_disagg.kv_transfer.push_receiver import Expected, PushReceiver
from trtllm_disagg.testing.fake_transport import FakeTransport

ENDPOINT = "prefill"
LAYOUT = KvLayout("model", 1, 16, 1, 8, "float32")
METADATA = PeerMetadata("engine", "NIXL", LAYOUT, 4, b"")


class ScriptedPeers(Peers):
    """The prefill engine takes every offer, and says of all tickets that they are not open. With `is_done` it sends
    its notice while it is being asked.
    """

    def __init__(self, is_done: bool) -> None:
        super().__init__(
            FakeTransport(),
            LAYOUT,
            authentication=OneHost().authentication(),
            timeouts=KvTimeouts(ask=0.01),
            on_news=lambda: None,
        )
        self.metadata.known[ENDPOINT] = METADATA
        self.receiver = PushReceiver("decode", "here", self, on_news=lambda: None, on_busy=lambda: None)
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
def peers(request: pytest.FixtureRequest) -> Iterator[ScriptedPeers]:
    made = ScriptedPeers(is_done=request.param)
    yield made
    made.close()


def expect_one(peers: ScriptedPeers) -> Expected:
    expected = Expected(endpoint=ENDPOINT, request=1, prompt=b"p" * 16, blocks=[0], num_known=0, seconds=30.0)
    peers.receiver.expect(expected)
    assert peers.answered.wait(30)
    # What comes next on the peer's worker comes behind the answer.
    behind = Event()
    peers.workers.submit(ENDPOINT, behind.set)
    assert behind.wait(30)
    return expected


@pytest.mark.parametrize("peers", [True], indirect=True)
def test_an_answer_about_a_prefill_that_has_ended_meanwhile_drops_no_metadata(peers: ScriptedPeers) -> None:
    expected = expect_one(peers)
    assert expected.notice is not None
    assert expected.error is None
    assert peers.metadata.known == {ENDPOINT: METADATA}


@pytest.mark.parametrize("peers", [False], indirect=True)
def test_request_that_prefill_has_forgotten_fails_and_drops_its_metadata(peers: ScriptedPeers) -> None:
    expected = expect_one(peers)
    assert expected.error is not None
    assert "ended this request without a notice or a failure message" in str(expected.error)
    assert peers.metadata.known == {}
