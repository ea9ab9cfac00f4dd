"""Pulls from several senders at once: a sender that stalls delays no other's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from tests.support.pools import LAYOUT
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.access import SameUserAuthentication
from trtllm_disagg.kv_transfer.base import KvTimeouts, PeerMetadata
from trtllm_disagg.kv_transfer.handle import KvHandle, decode_handle
from trtllm_disagg.kv_transfer.peers import Peers, PeerWorkers
from trtllm_disagg.kv_transfer.pull import KvReceiver, KvSender, Pull


class NoBytes:
    """A transport that has nothing to move."""

    name = "NONE"

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def serve(self, sender: str) -> bytes:
        return b""

    def read(self, peer: PeerMetadata, remote: np.ndarray, local: np.ndarray, timeout: float) -> int:
        return 0

    def write(self, peer: PeerMetadata, remote: np.ndarray, local: np.ndarray, timeout: float) -> int:
        raise AssertionError("not asked for here")

    def forget(self, peer: PeerMetadata) -> None:
        """Nothing is remembered."""

    def progress(self) -> None:
        """No peer connects."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def sender() -> Iterator[KvSender]:
    made = KvSender(
        NoBytes(),
        LAYOUT,
        8,
        authentication=SameUserAuthentication(),
        timeouts=KvTimeouts(),
        on_lease_ended=lambda: None,
    )
    made.start()
    yield made
    made.close()


@pytest.fixture
def peers() -> Peers:
    return Peers(
        NoBytes(),
        LAYOUT,
        authentication=SameUserAuthentication(),
        timeouts=KvTimeouts(),
        on_news=lambda: None,
    )


@pytest.fixture
def stalled() -> Iterator[str]:
    """The endpoint of a process that takes connections and says nothing."""
    listener, endpoint = SameUserAuthentication().listen()
    with listener:
        yield endpoint


def handoff(sender: KvSender, request_id: int) -> KvHandle:
    return decode_handle(
        sender.lease(request_id, [request_id], prompt_digest=b"p" * 16, num_tokens=1, seed=0, cached_tokens=0)
    )


def test_a_stalled_sender_delays_no_other(sender: KvSender, peers: Peers, stalled: str) -> None:
    finished = threading.Semaphore(0)
    receiver = KvReceiver(peers, on_finished=finished.release)
    good = handoff(sender, 1)
    stuck = msgspec.structs.replace(good, endpoint=stalled)
    try:
        receiver.start(Pull(handle=stuck, remote=[1], local=[1]))
        receiver.start(Pull(handle=good, remote=[1], local=[1]))

        # The good one comes first: the question to the other peer may take five seconds.
        assert finished.acquire(timeout=20)
        (first,) = receiver.take_finished()
        assert (first.handle, first.outcome.error) == (good, None)
        assert finished.acquire(timeout=30)
        (second,) = receiver.take_finished()
        assert second.handle == stuck
        assert isinstance(second.outcome.error, KvTransferError)
    finally:
        peers.close()


def test_the_number_of_workers_is_bounded(sender: KvSender, peers: Peers) -> None:
    finished = threading.Semaphore(0)
    receiver = KvReceiver(peers, on_finished=finished.release)
    before = threading.active_count()
    try:
        for port in range(1, 101):
            nowhere = msgspec.structs.replace(handoff(sender, port), endpoint=f"unix://@nowhere:{port}")
            receiver.start(Pull(handle=nowhere, remote=[1], local=[1]))
        for _ in range(100):
            assert finished.acquire(timeout=30)
        assert len(receiver.take_finished()) == 100
        assert threading.active_count() - before <= 64
    finally:
        peers.close()


def test_a_new_peer_has_a_thread_of_its_own_after_many_that_are_gone() -> None:
    workers, ended, go = PeerWorkers(), threading.Semaphore(0), threading.Event()

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


def test_work_submitted_for_one_peer_runs_in_order() -> None:
    workers, ran = PeerWorkers(), queue.SimpleQueue[int]()
    try:
        for number in range(300):
            workers.submit("unix://@one:1", ran.put, number)
            workers.submit(f"unix://@other:{number}", threading.Event().set)
        assert [ran.get(timeout=20) for _ in range(300)] == list(range(300))
    finally:
        workers.close()
