"""The interface of a KV transport, which reads and writes a peer's blocks."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from trtllm_disagg.common.machine import ProcessMark
from trtllm_disagg.errors import HandoffRefusedError, KvTransferError
from trtllm_disagg.wire.kv_handle import UNREADABLE

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: Bytes of a transport's buffer beside the pool, for reads that do not go into the pool.
STAGING_BYTES = 16 << 20
#: Limit, since a transport makes tables of a peer's whole pool.
MAX_POOL_BLOCKS = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTimeouts:
    """Time limits in seconds."""

    #: A read or a write, a lease, and the wait for the peer.
    transfer: float = 60.0
    #: One message on the control channel and its answer.
    control: float = 5.0
    #: Interval of checks for the end of late transfers, and for peers that still work on a request.
    ask: float = 0.5
    #: A peer is dead after its control channel was closed for this long: by then its ranks have ended, and their
    #: bytes have arrived.
    dead: float = 15.0
    #: A withdrawal's wait for a running write.
    stop: float = 1.0


class KvLayout(msgspec.Struct, frozen=True):
    """The properties that two pools must share to exchange blocks (their number may differ)."""

    model: str
    num_layers: int
    tokens_per_block: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    #: Order of the pool's dimensions: all numbers could match although the bytes differ.
    order: str = "block, layer, k|v, slot, head, dim"

    def fingerprint(self) -> bytes:
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    def require_same(self, other: KvLayout) -> None:
        """Raise HandoffRefusedError naming each field that differs."""
        own, other_fields = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        differing = [
            f"{key}: prefill {other_fields[key]!r}, decode {own[key]!r}"
            for key in own
            if own[key] != other_fields[key]
        ]
        if differing:
            raise HandoffRefusedError("prefill and decode KV do not fit together: " + "; ".join(differing))


def prompt_digest(prompt: Sequence[int], cache_salt: str) -> bytes:
    """16 bytes over token ids and cache salt, to bind a handoff to its prompt. Raises OverflowError above 32 bits."""
    # The salt's digest has a fixed length, so that no token can be part of it.
    hasher = hashlib.blake2b(hashlib.blake2b(cache_salt.encode()).digest(), digest_size=16)
    tokens = array("I", prompt)
    if sys.byteorder == "big":
        tokens.byteswap()
    hasher.update(tokens)
    return hasher.digest()


class PeerMetadata(msgspec.Struct, frozen=True):
    """What an engine's peers must know of it; each fetches this once over the control channel."""

    sender: str
    transport: str
    layout: KvLayout
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOL_BLOCKS)]
    #: In the transport's format; of several ranks: see tensor_parallel/transfers.py.
    address: bytes


def decoded_address(peer: PeerMetadata, address_type: type[T]) -> T:
    """Raises KvTransferError for metadata of another transport."""
    try:
        return msgspec.msgpack.decode(peer.address, type=address_type)
    except UNREADABLE as error:
        raise KvTransferError(f"the metadata of {peer.sender} has an unreadable address: {error}") from error


def require_running(peer: PeerMetadata, process: ProcessMark) -> None:
    """Raises KvTransferError if the peer's process on this host has ended."""
    if not process.is_running:
        raise KvTransferError(f"{peer.sender} is gone (pid {process.pid})")


def _never() -> bool:
    return False


class ReadTimeoutError(TimeoutError):
    """A read or write did not end in time. If `may_land_later`, do not reuse its destination before `has_ended`
    returns True; call that, repeatedly, on the peer's transfer thread.
    """

    def __init__(self, message: str, *, may_land_later: bool, has_ended: Callable[[], bool] = _never) -> None:
        super().__init__(message)
        self.may_land_later = may_land_later
        self.has_ended = has_ended


class BlockPairs(NamedTuple):
    """What a transfer moves, index by index: int32 block ids in the peer's pool, and in this engine's."""

    remote: np.ndarray
    local: np.ndarray

    @classmethod
    def of(cls, remote: Sequence[int], local: Sequence[int]) -> BlockPairs:
        return cls(np.asarray(remote, np.int32), np.asarray(local, np.int32))


class KvTransport(Protocol):
    """`read`, `write` and `forget` block the peer's thread; `progress` has its own; others run on the engine core's.

    The pool is `kv[block, layer, k|v, slot, head, dim]`, so a block is one range of bytes.
    """

    name: str

    def serve(self, sender: str) -> bytes:
        """Make the pool readable under this name; return `PeerMetadata.address`."""

    def read(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        """Copy remote blocks into local ones, in order. Returns bytes moved.

        Raises ReadTimeoutError, or KvTransferError when the peer is gone or the read failed.
        """

    def write(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        """Copy local blocks into remote ones, in order; complete on return. Otherwise like `read`."""

    def forget(self, peer: PeerMetadata) -> None:
        """Drop the cached state of a peer."""

    def progress(self) -> None:
        """Serve peers that connect, read or write, for a transport without a thread."""

    def close(self) -> None: ...


class StagingTransport(KvTransport, Protocol):
    """A transport that can also read blocks of another size than its pool's."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeroed memory for the pool, which this transport can serve to peers."""

    def fetched(
        self, peer: PeerMetadata, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> AbstractContextManager[np.ndarray]:
        """Remote blocks of `block_bytes`, as an array (blocks, block_bytes) of uint8, until the context ends.

        Raises as `read` does, but a late read never lands in the pool.
        """


def common_runs(remote: np.ndarray, local: np.ndarray) -> list[tuple[int, int]]:
    """(start, length) of each run in which both id lists grow by one: one copy moves it."""
    breaks = np.flatnonzero((np.diff(remote) != 1) | (np.diff(local) != 1)) + 1
    starts = np.concatenate(([0], breaks)) if len(remote) else np.empty(0, np.int64)
    ends = np.concatenate((breaks, [len(remote)])) if len(remote) else starts
    return [(int(start), int(end - start)) for start, end in zip(starts, ends, strict=True)]
