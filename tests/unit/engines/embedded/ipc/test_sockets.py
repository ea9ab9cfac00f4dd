"""Messages between two processes over one socket: whole, in order, and no sender waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from trtllm_disagg.engines.embedded.ipc import sockets
from trtllm_disagg.engines.embedded.ipc.sockets import Link

Message = tuple[int, bytes]
_decoder = msgspec.msgpack.Decoder(Message)
#: More than any socket takes at once.
LARGE = bytes(16 << 20)


@pytest.fixture
def ends() -> Iterator[tuple[Link[Message], Link[Message]]]:
    here, there = (Link(end, _decoder) for end in socket.socketpair())
    yield here, there
    here.close()
    there.close()


def received(link: Link[Message], count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += link.receive(wait=True)
    return messages


def test_waiting_messages_are_received_together(ends: tuple[Link[Message], ...]) -> None:
    here, there = ends
    assert there.receive(wait=False) == []
    for i in range(3):
        here.send((i, b"x"))
    assert there.receive(wait=True) == [(i, b"x") for i in range(3)]


def test_a_sender_does_not_wait_for_a_slow_reader_and_the_order_stays(
    ends: tuple[Link[Message], ...],
) -> None:
    here, there = ends
    here.send((0, LARGE))
    here.send((1, b""))
    here.send((2, LARGE))  # the reader has not read a byte so far
    assert [(i, len(data)) for i, data in received(there, 3)] == [(0, len(LARGE)), (1, 0), (2, len(LARGE))]
    here.flush(5)
    here.send((3, b"again"))
    assert received(there, 1) == [(3, b"again")]


def test_several_threads_send_and_no_message_is_torn(ends: tuple[Link[Message], ...]) -> None:
    here, there = ends
    data = bytes(100_000)

    def send(first: int) -> None:
        for i in range(first, first + 50):
            here.send((i, data))

    threads = [threading.Thread(target=send, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    messages = received(there, 200)
    for thread in threads:
        thread.join()
    assert all(each == data for _, each in messages)
    for k in range(4):
        assert [i for i, _ in messages if i // 1000 == k] == list(range(1000 * k, 1000 * k + 50))


def test_messages_before_the_close_are_received_before_eof(ends: tuple[Link[Message], ...]) -> None:
    here, there = ends
    there.send((9, b"never read"))
    here.send((1, b"last word"))
    here.close()
    assert there.receive(wait=True) == [(1, b"last word")]
    for _ in range(2):
        with pytest.raises(EOFError):
            there.receive(wait=True)
    there.send((2, b"unread"))


def test_peer_closed_within_a_message_is_eof(ends: tuple[Link[Message], ...]) -> None:
    here, there = ends
    here.send((1, LARGE))
    here.close()
    with pytest.raises(EOFError):
        received(there, 1)


def test_a_reader_that_stays_too_far_behind_is_taken_for_gone(
    ends: tuple[Link[Message], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_BACKLOG_BYTES", 2 * len(LARGE))
    here, there = ends
    for i in range(4):
        here.send((i, LARGE))
    here.flush(5)
    with pytest.raises(EOFError):
        received(there, 4)
    with pytest.raises(EOFError):
        here.receive(wait=True)
