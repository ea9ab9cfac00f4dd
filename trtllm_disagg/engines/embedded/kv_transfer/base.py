"""The interface of a KV transport: one way to read a peer's blocks, and to write them."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

import msgspec
import numpy as np

from trtllm_disagg.errors import HandoffRefusedError, KvTransferError
from trtllm_disagg.processes.machine import ProcessMark
from trtllm_disagg.wire.kv_handle import UNREADABLE

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: A transport's buffer beside the pool has this size: what it reads at once when blocks are not read in place.
STAGING_BYTES = 16 << 20
#: A transport makes tables of a peer's whole pool.
MAX_POOL_BLOCKS = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTimeouts:
    """Time limits in seconds."""

    #: For a read or a write, a lease, and the wait for the peer.
    transfer: float = 60.0
    #: For one message on the control channel and its answer.
    control: float = 5.0
    #: Between two checks whether a late transfer has ended, and whether the peer still works on the request.
    ask: float = 0.5
    #: A peer is dead after its control channel was closed for this long. An engine closes the channel first: by then
    #: it and its ranks have ended or been killed, and the bytes that they had sent have arrived.
    dead: float = 15.0
    #: A withdrawal waits this long for a write that has begun.
    stop: float = 1.0


class KvLayout(msgspec.Struct, frozen=True):
    """The properties that two pools must share before one may read the other's blocks; their number is not one."""

    model: str
    num_layers: int
    tokens_per_block: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    #: Order of the pool's dimensions: with another one all numbers could be the same and the bytes differ.
    order: str = "block, layer, k|v, slot, head, dim"

    def fingerprint(self) -> bytes:
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    def require_same(self, other: KvLayout) -> None:
        """Raise HandoffRefusedError with one line per differing field."""
        own, other_fields = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        differing = [
            f"{key}: prefill {other_fields[key]!r}, decode {own[key]!r}"
            for key in own
            if own[key] != other_fields[key]
        ]
        if differing:
            raise HandoffRefusedError("prefill and decode KV do not fit together: " + "; ".join(differing))


def prompt_digest(prompt: Sequence[int], cache_salt: str) -> bytes:
    """Binds a handoff to its prompt: 16 bytes over the token ids and the cache salt. Raises OverflowError for an id
    outside of 32 bits.
    """
    # The salt at a fixed length, so that it cannot be mistaken for tokens.
    hasher = hashlib.blake2b(hashlib.blake2b(cache_salt.encode()).digest(), digest_size=16)
    tokens = array("I", prompt)
    if sys.byteorder == "big":
        tokens.byteswap()
    hasher.update(tokens)
    return hasher.digest()


class PeerMetadata(msgspec.Struct, frozen=True):
    """Properties of an engine that its peers need; a peer fetches them once over the control channel."""

    sender: str
    transport: str
    layout: KvLayout
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOL_BLOCKS)]
    #: The transport's own format; for an engine of several ranks see tensor_parallel/transfers.py.
    address: bytes


def decoded_address(peer: PeerMetadata, kind: type[T]) -> T:
    """Raises KvTransferError for metadata of another transport."""
    try:
        return msgspec.msgpack.decode(peer.address, type=kind)
    except UNREADABLE as error:
        raise KvTransferError(f"the metadata of {peer.sender} has an unreadable address: {error}") from error


def require_running(peer: PeerMetadata, process: ProcessMark) -> None:
    """Raises KvTransferError when the peer's process, which is on this host, has ended."""
    if not process.is_running:
        raise KvTransferError(f"{peer.sender} is gone (pid {process.pid})")


def _never() -> bool:
    return False


class ReadTimeoutError(TimeoutError):
    """A read or write did not end in time. `may_land_later`: it may still fill its destination, which must not be
    used again before `has_ended` returns True. `has_ended` may be called repeatedly, on the peer's transfer thread.
    """

    def __init__(self, message: str, *, may_land_later: bool, has_ended: Callable[[], bool] = _never) -> None:
        super().__init__(message)
        self.may_land_later = may_land_later
        self.has_ended = has_ended


class KvTransport(Protocol):
    """`read`, `write` and `forget` run on the peer's thread, and block; `progress` on a thread of its own; the rest on
    the engine core's.

    The pool is `kv[block, layer, k|v, slot, head, dim]`, so a block is one range of bytes.
    """

    name: str

    def serve(self, sender: str) -> bytes:
        """Make the pool readable under this name; return `PeerMetadata.address`."""
        ...

    def read(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        """Copy remote blocks (int32 ids) into local ones, in order. Returns bytes moved.

        Raises ReadTimeoutError, or KvTransferError when the peer is gone or the read failed.
        """
        ...

    def write(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        """Copy local blocks into remote ones, in order; they are there when it returns. Like `read` otherwise."""
        ...

    def forget(self, peer: PeerMetadata) -> None:
        """Drop what is cached about a peer."""
        ...

    def progress(self) -> None:
        """Serve peers that connect, read or write, if the transport has no thread for that."""
        ...

    def close(self) -> None: ...


class StagingTransport(KvTransport, Protocol):
    """A transport with a pool, which can also read blocks of another size than the pool's."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the pool that this transport can serve to peers. Zeroed."""
        ...

    def fetched(
        self, peer: PeerMetadata, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> AbstractContextManager[np.ndarray]:
        """Remote blocks of `block_bytes`, as an array (blocks, block_bytes) of uint8, until the context ends.

        Raises what `read` raises, but a read that may land late does not land in the pool.
        """
        ...


def common_runs(remote: np.ndarray, local: np.ndarray) -> list[tuple[int, int]]:
    """(start, length) of each stretch in which both id lists grow by one, so that one copy moves it."""
    breaks = np.flatnonzero((np.diff(remote) != 1) | (np.diff(local) != 1)) + 1
    starts = np.concatenate(([0], breaks)) if len(remote) else np.empty(0, np.int64)
    ends = np.concatenate((breaks, [len(remote)])) if len(remote) else starts
    return [(int(start), int(end - start)) for start, end in zip(starts, ends, strict=True)]
