"""Messages on a stream: their limits in time and size."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from trtllm_disagg.engines.embedded.ipc.sockets import (
    UnreadableError,
    framed,
    receive_exactly,
    receive_frame,
    receive_only_frame,
)

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_nothing_is_received_after_the_deadline_although_bytes_are_there(ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(b"late")
    with pytest.raises(TimeoutError):
        receive_exactly(ours, 4, deadline=time.monotonic() - 1.0)


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 9])
def test_a_frame_is_continued_wherever_its_first_part_ends(ends: Ends, cut: int) -> None:
    ours, theirs = ends
    frame = framed(b"hello")
    theirs.sendall(frame[cut:] + framed(b"next"))
    assert receive_frame(ours, deadline=time.monotonic() + 5.0, begun=frame[:cut]) == b"hello"
    assert receive_frame(ours, deadline=time.monotonic() + 5.0) == b"next"


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 1000])
def test_a_whole_frame_of_any_length_is_received(ends: Ends, payload: bytes) -> None:
    ours, theirs = ends
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    theirs.sendall(framed(payload))
    assert receive_only_frame(ours, seconds=5.0, max_bytes=1 << 20) == payload


def test_a_whole_frame_has_its_limits_and_its_end(ends: Ends) -> None:
    ours, theirs = ends
    with pytest.raises(TimeoutError):
        receive_only_frame(ours, seconds=0.01, max_bytes=100)
    theirs.sendall(framed(b"answer") + b"and more")
    with pytest.raises(UnreadableError, match="8 bytes behind"):
        receive_only_frame(ours, seconds=5.0, max_bytes=100)
    theirs.sendall(framed(b"12345"))
    with pytest.raises(UnreadableError, match="5 bytes; at most 4"):
        receive_only_frame(ours, seconds=5.0, max_bytes=4)
    theirs.close()
    with pytest.raises(EOFError):
        receive_only_frame(ours, seconds=5.0, max_bytes=100)
