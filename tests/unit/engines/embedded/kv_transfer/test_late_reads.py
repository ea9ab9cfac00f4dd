"""A lease may end while its blocks are being read: the reader learns of it, but is not left hanging."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.pools import LAYOUT
from trtllm_disagg.engines.embedded.kv_transfer.access import SameUserAuthentication
from trtllm_disagg.engines.embedded.kv_transfer.base import KvTimeouts, PeerMetadata
from trtllm_disagg.engines.embedded.kv_transfer.pull import KvSender


class CountingTransport:
    """Moves nothing; `progressed` is released each time that the sender gives readers a chance."""

    name = "counting"

    def __init__(self) -> None:
        self.progressed = threading.Semaphore(0)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        raise AssertionError("not asked for here")

    def serve(self, sender: str) -> bytes:
        return b""

    def read(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        raise AssertionError("not asked for here")

    def write(self, peer: PeerMetadata, remote: np.ndarray, local: np.ndarray, timeout: float) -> int:
        raise AssertionError("not asked for here")

    def forget(self, peer: PeerMetadata) -> None:
        """Knows no peer."""

    def progress(self) -> None:
        self.progressed.release()

    def close(self) -> None:
        """Holds nothing."""


@pytest.fixture
def transport() -> CountingTransport:
    return CountingTransport()


@pytest.fixture
def sender(transport: CountingTransport) -> Iterator[KvSender]:
    sender = KvSender(
        transport,
        LAYOUT,
        8,
        authentication=SameUserAuthentication(),
        timeouts=KvTimeouts(),
        on_lease_ended=lambda: None,
    )
    sender.start()
    yield sender
    sender.close()


def test_a_reader_is_served_although_its_lease_was_released_meanwhile(
    sender: KvSender, transport: CountingTransport
) -> None:
    """Else its read never ends, times out, and costs it the blocks that it reads into."""
    sender.lease(1, [0, 1], prompt_digest=b"p", num_tokens=8, seed=0, cached_tokens=0)
    sender.leases.release_request(1)
    assert [lease.blocks for lease in sender.leases.take_ended()] == [[0, 1]]

    while transport.progressed.acquire(blocking=False):
        """What was done for the lease while it was held."""

    assert all(transport.progressed.acquire(timeout=20.0) for _ in range(5))
