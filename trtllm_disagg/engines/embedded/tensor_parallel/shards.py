"""The pools of a sender's ranks, and how a rank with another part of the KV heads reads from them.

Where pools are divided differently, the heads that two ranks have in common are a short stretch of every slot
(`kv[block, layer, k|v, slot, head, dim]`). Reading them one by one is slow (docs/log/kv-transfer.md): full blocks are
read, into memory beside the pool, and the heads copied out of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from trtllm_disagg.engines.embedded.kv_transfer.base import (
    STAGING_BYTES,
    PeerMetadata,
    ReadTimeoutError,
    StagingTransport,
    decoded_address,
)
from trtllm_disagg.errors import HandoffRefusedError, KvTransferError

#: Starts the address of a sender with several ranks; no transport's own address starts so.
_SHARDED = b"trtllm-disagg shards\0"
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Overlap:
    """Heads that a rank of the sender and this rank have in common, as each of them counts its own."""

    shard: int
    theirs: slice
    mine: slice


def overlaps(rank: int, num_ranks: int, num_shards: int, num_heads: int) -> list[Overlap]:
    """`num_heads` are divided evenly among `num_ranks` here and `num_shards` there."""
    mine, theirs = num_heads // num_ranks, num_heads // num_shards
    begin, end = rank * mine, (rank + 1) * mine
    found = []
    for shard in range(begin // theirs, -(-end // theirs)):
        first, last = max(begin, shard * theirs), min(end, (shard + 1) * theirs)
        found.append(
            Overlap(
                shard,
                slice(first - shard * theirs, last - shard * theirs),
                slice(first - begin, last - begin),
            )
        )
    return found


class Shard(msgspec.Struct, frozen=True):
    """The pool of one rank of a sender: all of its blocks, and its part of the KV heads."""

    sender: str
    address: bytes


def join_addresses(shards: list[Shard]) -> bytes:
    """What `PeerMetadata.address` is for these ranks together, rank 0 first."""
    return shards[0].address if len(shards) == 1 else _SHARDED + _encoder.encode(shards)


def shards_of(peer: PeerMetadata) -> list[PeerMetadata]:
    """Metadata of each rank. Raises KvTransferError for an address that is unreadable."""
    if not peer.address.startswith(_SHARDED):
        return [peer]
    joined = msgspec.structs.replace(peer, address=peer.address.removeprefix(_SHARDED))
    shards = decoded_address(joined, list[Shard])
    return [msgspec.structs.replace(peer, sender=s.sender, address=s.address) for s in shards]


class ShardReader:
    """Fills one rank's pool from a sender with the same number of ranks, or another one."""

    def __init__(
        self,
        transport: StagingTransport,
        pool: torch.Tensor,
        rank: int,
        num_ranks: int,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._transport = transport
        self._staging_bytes = staging_bytes
        self._pool = pool
        self._rank, self._num_ranks = rank, num_ranks

    def read(
        self, peer: PeerMetadata, remote_blocks: np.ndarray, local_blocks: np.ndarray, timeout: float
    ) -> int:
        """As KvTransport.read: this rank's heads of the blocks. In place when both are divided alike."""
        shards = shards_of(peer)
        if len(shards) == self._num_ranks:
            return self._transport.read(shards[self._rank], remote_blocks, local_blocks, timeout)
        if not shards or peer.layout.num_kv_heads % len(shards) or self._pool.is_cuda:
            raise HandoffRefusedError(
                f"prefill has tensor_parallel_size {len(shards)}, decode {self._num_ranks}: "
                "KV of such a pair can be divided anew on CPUs only, and evenly"
            )
        deadline = time.monotonic() + timeout
        heads = peer.layout.num_kv_heads // len(shards)
        return sum(
            self._read_part(shards[part.shard], heads, part, remote_blocks, local_blocks, deadline)
            for part in overlaps(self._rank, self._num_ranks, len(shards), peer.layout.num_kv_heads)
        )

    def forget(self, peer: PeerMetadata) -> None:
        for shard in shards_of(peer):
            self._transport.forget(shard)

    def _read_part(
        self,
        metadata: PeerMetadata,
        heads: int,
        part: Overlap,
        remote: np.ndarray,
        local: np.ndarray,
        deadline: float,
    ) -> int:
        """From a rank with so many heads. Bytes that came over, heads that are not wanted here included."""
        pool = _as_bytes(self._pool)
        _, rows, _, head_bytes = pool.shape
        block_bytes = rows * heads * head_bytes
        at_once = max(1, self._staging_bytes // block_bytes)
        for start in range(0, len(remote), at_once):
            chunk = slice(start, start + at_once)
            try:
                with self._transport.fetched(
                    metadata, remote[chunk], block_bytes, max(0.0, deadline - time.monotonic())
                ) as fetched:
                    theirs = fetched.reshape(-1, rows, heads, head_bytes)
                    pool[local[chunk], :, part.mine] = theirs[:, :, part.theirs]
            except ReadTimeoutError as error:
                # It may land, but not in the pool.
                raise KvTransferError(str(error)) from error
        return int(len(remote) * block_bytes)


def _as_bytes(pool: torch.Tensor) -> np.ndarray:
    """(blocks, rows, heads, bytes of a head)"""
    blocks, layers, two, slots, heads, _ = pool.shape
    array: np.ndarray = pool.view(torch.uint8).numpy().reshape(blocks, layers * two * slots, heads, -1)
    return array
