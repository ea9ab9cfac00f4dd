"""The interface of a KV transport: one way to read a peer's blocks, and to write them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from trtllm_disagg.kv_transfer.layout import KvLayout

if TYPE_CHECKING:
    import torch


class PeerCard(msgspec.Struct, frozen=True):
    """What a receiver needs to know of a sender, fetched once over the control channel and then kept."""

    sender: str
    transport: str
    layout: KvLayout
    num_blocks: int
    #: Only the transport understands it. Of a sender with several ranks: relayout.py.
    address: bytes


def _never() -> bool:
    return False


class ReadTimeoutError(TimeoutError):
    """A read or write did not end in time. `may_land_later`: it may still fill its destination, which must not be
    used again before `has_ended` says so. That may be asked as often as one likes, on the peer's transfer thread.
    """

    def __init__(self, message: str, *, may_land_later: bool, has_ended: Callable[[], bool] = _never) -> None:
        super().__init__(message)
        self.may_land_later = may_land_later
        self.has_ended = has_ended


class KvTransport(Protocol):
    """`read` and `write` block and run on the peer's transfer thread; all else is called by the engine core's thread.

    The pool is `kv[block, layer, k|v, slot, head, dim]`, so a block is one range of bytes.
    """

    name: str

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the pool that this transport can serve to peers. Zeroed."""
        ...

    def serve(self, sender: str) -> bytes:
        """Make the pool readable under this name; return `PeerCard.address`."""
        ...

    def read(
        self, peer: PeerCard, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        """Copy remote blocks (int32 ids) into local ones, in order. Returns bytes moved.

        Raises ReadTimeoutError, or KvTransferError when the peer is gone or the read failed.
        """
        ...

    def write(
        self, peer: PeerCard, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        """Copy local blocks into remote ones, in order; they are there when it returns. Like `read` otherwise."""
        ...

    def forget(self, peer: PeerCard) -> None:
        """Drop what is cached of a peer."""
        ...

    def progress(self) -> None:
        """Give the sender's side a slice of time while a receiver may be connecting."""
        ...

    def close(self) -> None: ...


class StagingTransport(KvTransport, Protocol):
    """Reads blocks also when they do not fit into the pool as they are."""

    def fetched(
        self, peer: PeerCard, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> AbstractContextManager[np.ndarray]:
        """Remote blocks of that size, (blocks, block_bytes) uint8, until the context ends.

        Raises what `read` raises, but a read that may land late does not land in the pool.
        """
        ...
