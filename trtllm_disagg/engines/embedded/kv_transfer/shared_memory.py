"""Same-host transport: the pool lives in an anonymous shared memory file that peers map.

A memfd, unlike a file in /dev/shm, leaves nothing behind after `kill -9`. Peers open it through /proc, which requires
the same user and pid namespace.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from trtllm_disagg.common.machine import ProcessMark, own_mark
from trtllm_disagg.engines.embedded.kv_transfer.base import (
    BlockPairs,
    PeerMetadata,
    common_runs,
    decoded_address,
    require_running,
)
from trtllm_disagg.errors import ConfigError, KvTransferError

_HUGE_PAGE_BYTES = 2 << 20


class _Address(msgspec.Struct, frozen=True):
    process: ProcessMark
    fd: int
    nbytes: int


@dataclass(slots=True)
class _Mapping:
    address: _Address
    memory: mmap.mmap
    blocks: np.ndarray  # (num_blocks, block_bytes) uint8

    def close(self) -> None:
        self.blocks = np.empty((0, 0), np.uint8)
        with contextlib.suppress(BufferError):
            self.memory.close()


class SharedMemoryTransport:
    name = "SHARED_MEMORY"

    def __init__(self) -> None:
        self._fd = -1
        self._memory: mmap.mmap | None = None
        self._blocks = np.empty((0, 0), np.uint8)
        self._peers: dict[str, _Mapping] = {}
        # Changed by each peer's thread.
        self._lock = threading.Lock()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            raise ConfigError.bad_value(
                "cache_transceiver_config.backend",
                self.name,
                "NIXL on a CUDA device; shared memory is for the CPU",
            )
        nbytes = math.prod(shape) * dtype.itemsize
        self._fd = os.memfd_create("trtllm-disagg-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        # Allocate every page now, or each block's first write would pay for its pages.
        self._memory = mmap.mmap(self._fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        pool = torch.frombuffer(self._memory, dtype=dtype).view(shape)
        self._blocks = pool.view(torch.uint8).numpy().reshape(shape[0], -1)
        return pool

    def serve(self, sender: str) -> bytes:
        address = _Address(own_mark(), self._fd, self._blocks.nbytes)
        return msgspec.msgpack.encode(address)

    def read(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        source = self._mapping(peer).blocks
        return _copy(source, blocks.remote, self._blocks, blocks.local)

    def write(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        target = self._mapping(peer).blocks
        return _copy(self._blocks, blocks.local, target, blocks.remote)

    @contextlib.contextmanager
    def fetched(
        self, peer: PeerMetadata, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> Iterator[np.ndarray]:
        theirs = self._mapping(peer).blocks
        if theirs.shape[1] != block_bytes:
            raise KvTransferError(
                f"blocks of {peer.sender} have {theirs.shape[1]} bytes; {block_bytes} expected"
            )
        yield theirs[blocks]

    def forget(self, peer: PeerMetadata) -> None:
        with self._lock:
            mapping = self._peers.pop(peer.sender, None)
        if mapping is not None:
            mapping.close()

    def progress(self) -> None:
        """Does nothing: readers map the memory themselves."""

    def close(self) -> None:
        for mapping in self._peers.values():
            mapping.close()
        self._peers.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _mapping(self, peer: PeerMetadata) -> _Mapping:
        """The peer's pool, mapped once. Checks the process first: a mapping outlives a dead peer."""
        address = decoded_address(peer, _Address)
        require_running(peer, address.process)
        mapping = self._peers.get(peer.sender)
        if mapping is None:
            self._unmap_the_dead()
            try:
                mapping = self._map(peer, address)
            except (OSError, ValueError, OverflowError) as error:
                raise KvTransferError(f"cannot map the KV pool of {peer.sender}: {error}") from error
            with self._lock:
                self._peers[peer.sender] = mapping
        return mapping

    def _unmap_the_dead(self) -> None:
        """A restarted worker has a new name; the old one's memory would stay mapped."""
        with self._lock:
            dead = [name for name, each in self._peers.items() if not each.address.process.is_running]
            unmapped = [self._peers.pop(name) for name in dead]
        for mapping in unmapped:
            mapping.close()

    def _map(self, peer: PeerMetadata, address: _Address) -> _Mapping:
        fd = os.open(f"/proc/{address.process.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            # Not MAP_POPULATE, which would stop the engine for 0.2 s per GiB of the peer's pool.
            memory = mmap.mmap(fd, address.nbytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        return _Mapping(address, memory, np.frombuffer(memory, np.uint8).reshape(peer.num_blocks, -1))


def _copy(source: np.ndarray, from_blocks: np.ndarray, target: np.ndarray, to_blocks: np.ndarray) -> int:
    """Returns the number of bytes copied."""
    if source.shape[1] != target.shape[1]:
        raise KvTransferError(f"blocks of {source.shape[1]} bytes do not fit those of {target.shape[1]}")
    for start, length in common_runs(from_blocks, to_blocks):
        begin, to = from_blocks[start], to_blocks[start]
        target[to : to + length] = source[begin : begin + length]
    return len(from_blocks) * int(source.shape[1])


# Memory that other processes read fast, for NIXL's pool.


def huge_page_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeroed CPU memory with every page present, on huge pages if the kernel has them.

    A read from another process pins each page: with 2 MiB pages on both ends it is as fast as memcpy, with 4 KiB
    slower.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = torch.frombuffer(memory, dtype=torch.uint8)
    start = -pages.data_ptr() % _HUGE_PAGE_BYTES
    return pages[start : start + nbytes].zero_().view(dtype).view(shape)


def new_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory on the device; huge pages on the CPU."""
    if device.type == "cpu":
        return huge_page_tensor(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
