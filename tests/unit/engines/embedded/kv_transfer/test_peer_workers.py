"""Pulls from several senders at once: a sender that stalls delays no other's."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch

from tests.support.clock import Clock
from tests.support.fake_transport import FakeTransport
from tests.support.meeting import wait_until
from tests.support.pools import DIM, HEADS, LAYERS, LAYOUT, SLOTS
from trtllm_disagg.engines.embedded.ipc.sockets import Listener, directory
from trtllm_disagg.engines.embedded.kv_transfer.base import KvTimeouts
from trtllm_disagg.engines.embedded.kv_transfer.connections import (
    LateTransfer,
    LateTransfers,
    PeerConnections,
    PeerThreads,
)
from trtllm_disagg.engines.embedded.kv_transfer.pull import KvReceiver, KvSender, Pull
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.wire.kv_handle import KvHandle, decode_handle


def transport() -> FakeTransport:
    """With eight blocks."""
    made = FakeTransport()
    made.allocate((8, LAYERS, 2, SLOTS, HEADS, DIM), torch.float32, torch.device("cpu"))
    return made


@dataclass(slots=True)
class Stalled:
    """A process that takes connections and says nothing."""

    listener: socket.socket
    endpoint: str

    def num_connected(self) -> int:
        self.listener.setblocking(False)
        with contextlib.ExitStack() as stack, contextlib.suppress(BlockingIOError):
            for count in itertools.count():
                connected = count
                stack.enter_context(self.listener.accept()[0])
        return connected


@pytest.fixture
def sender() -> Iterator[KvSender]:
    made = KvSender(transport(), LAYOUT, 8, timeouts=KvTimeouts(), on_lease_ended=lambda: None)
    made.start()
    yield made
    made.close()


def peers_with(timeouts: KvTimeouts) -> PeerConnections:
    return PeerConnections(transport(), LAYOUT, timeouts=timeouts, on_change=lambda: None)


@pytest.fixture
def peers() -> PeerConnections:
    return peers_with(KvTimeouts(control=1.0))


@pytest.fixture
def stalled() -> Iterator[Stalled]:
    with Listener("kv") as listener:
        yield Stalled(listener, f"unix://{listener.path}")


def handoff(sender: KvSender, request_id: int) -> KvHandle:
    return decode_handle(
        sender.lease(request_id, [request_id], prompt_digest=b"p" * 16, num_tokens=1, seed=0, cached_tokens=0)
    )


def test_a_stalled_sender_delays_no_other(sender: KvSender, peers: PeerConnections, stalled: Stalled) -> None:
    finished = threading.Semaphore(0)
    receiver = KvReceiver(peers, on_finished=finished.release)
    good = handoff(sender, 1)
    stuck = msgspec.structs.replace(good, endpoint=stalled.endpoint)
    try:
        receiver.start(Pull(handle=stuck, remote=[1], local=[1]))
        receiver.start(Pull(handle=good, remote=[1], local=[1]))

        # The good one comes first: the question to the other peer may take a second.
        assert finished.acquire(timeout=20)
        (first,) = receiver.take_finished()
        assert (first.handle, first.outcome.error) == (good, None)
        assert finished.acquire(timeout=30)
        (second,) = receiver.take_finished()
        assert second.handle == stuck
        assert isinstance(second.outcome.error, KvTransferError)
    finally:
        peers.close()


def test_pulls_behind_one_without_an_answer_end_with_it_and_ask_no_more(
    sender: KvSender, stalled: Stalled
) -> None:
    clock, finished = Clock(), threading.Semaphore(0)

    def one_has_ended() -> None:
        clock.now += 2.0
        finished.release()

    impatient = peers_with(KvTimeouts(control=0.2, transfer=1.0))
    receiver = KvReceiver(impatient, on_finished=one_has_ended, clock=clock)
    stuck = msgspec.structs.replace(handoff(sender, 1), endpoint=stalled.endpoint)
    try:
        for _ in range(5):
            receiver.start(Pull(handle=stuck, remote=[1], local=[1]))
        assert all(finished.acquire(timeout=20) for _ in range(5))
    finally:
        impatient.close()
    first, *others = (str(pull.outcome.error) for pull in receiver.take_finished())
    assert "no answer within 0.2 s" in first
    assert {error.partition(" was ")[2] for error in others} == {
        "busy, or did not answer, for 1 s: its KV was not read"
    }
    assert stalled.num_connected() == 1


def test_a_pull_whose_request_was_aborted_reads_nothing_and_gives_the_lease_back(
    sender: KvSender, peers: PeerConnections
) -> None:
    finished = threading.Semaphore(0)
    receiver = KvReceiver(peers, on_finished=finished.release)
    try:
        receiver.start(Pull(handle=handoff(sender, 1), remote=[1], local=[1], is_wanted=lambda: False))
        assert finished.acquire(timeout=20)
        (pull,) = receiver.take_finished()
        assert "aborted" in str(pull.outcome.error)
        wait_until(lambda: not len(sender.leases))
        assert peers.metadata.loads == 0
    finally:
        peers.close()


def test_the_number_of_workers_is_bounded(sender: KvSender, peers: PeerConnections) -> None:
    finished = threading.Semaphore(0)
    receiver = KvReceiver(peers, on_finished=finished.release)
    before = threading.active_count()
    try:
        for port in range(1, 101):
            nowhere = msgspec.structs.replace(
                handoff(sender, port), endpoint=f"unix://{directory()}/kv-1-1-{port:08x}"
            )
            receiver.start(Pull(handle=nowhere, remote=[1], local=[1]))
        for _ in range(100):
            assert finished.acquire(timeout=30)
        assert len(receiver.take_finished()) == 100
        assert threading.active_count() - before <= 64
    finally:
        peers.close()


def test_a_new_peer_has_a_thread_of_its_own_after_many_that_are_gone() -> None:
    workers, ended, go = PeerThreads(), threading.Semaphore(0), threading.Event()

    def stall() -> None:
        go.wait(20)

    try:
        for port in range(100):
            workers.submit(f"unix://@gone:{port}", ended.release)
            assert ended.acquire(timeout=20)
        workers.submit("unix://@stalls:1", stall)
        workers.submit("unix://@well:1", ended.release)
        assert ended.acquire(timeout=10)
    finally:
        go.set()
        workers.close()


def test_peers_for_which_the_system_has_no_thread_share_one_and_their_late_transfers_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers, ran, ended = PeerThreads(), queue.SimpleQueue[int](), threading.Event()
    late = LateTransfers(workers, ended.set, seconds=60.0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for number in range(4):
                workers.submit(f"unix://@refused:{number % 2}", ran.put, number)
            assert sorted(ran.get(timeout=20) for _ in range(4)) == [0, 1, 2, 3]
            late.add(LateTransfer("unix://@refused:0", lambda: True))
            assert ended.wait(20)
        workers.submit("unix://@later:1", ran.put, 4)
        assert ran.get(timeout=20) == 4
    finally:
        late.close()
        workers.close()


def test_work_submitted_for_one_peer_runs_in_order() -> None:
    workers, ran = PeerThreads(), queue.SimpleQueue[int]()
    try:
        for number in range(300):
            workers.submit("unix://@one:1", ran.put, number)
            workers.submit(f"unix://@other:{number}", threading.Event().set)
        assert [ran.get(timeout=20) for _ in range(300)] == list(range(300))
    finally:
        workers.close()


def test_a_peers_call_waits_for_the_one_before_although_threads_are_free() -> None:
    """Two threads would mix up the answers on the peer's one connection."""
    workers, go, second = PeerThreads(), threading.Event(), threading.Event()

    def first() -> None:
        assert go.wait(20)

    try:
        workers.submit("one", first)
        workers.submit("one", second.set)
        assert not second.wait(0.2)
        go.set()
        assert second.wait(20)
    finally:
        go.set()
        workers.close()


def test_work_that_raises_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    workers, ran = PeerThreads(), threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    try:
        workers.submit("unix://@one:1", fail)
        workers.submit("unix://@one:1", ran.set)
        assert ran.wait(20)
    finally:
        workers.close()
    assert "work for the peer unix://@one:1 failed unexpectedly" in caplog.text


def test_a_reader_is_served_although_its_lease_was_released_meanwhile(
    sender: KvSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its read never ends, times out, and costs it the blocks that it reads into."""
    progressed = threading.Semaphore(0)
    monkeypatch.setattr(FakeTransport, "progress", lambda transport: progressed.release())
    sender.lease(1, [0, 1], prompt_digest=b"p", num_tokens=8, seed=0, cached_tokens=0)
    sender.leases.release_request(1)
    assert [lease.blocks for lease in sender.leases.take_ended()] == [[0, 1]]

    while progressed.acquire(blocking=False):
        """What was done for the lease while it was held."""

    assert all(progressed.acquire(timeout=20.0) for _ in range(5))
