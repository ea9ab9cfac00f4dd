"""The yardsticks of a pull: memcpy inside one process, and the system call under NIXL's `cma`."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import torch

from trtllm_disagg.bench.kv_ends import KvShape
from trtllm_disagg.kv_transfer.memory import huge_page_tensor

#: IOV_MAX: ranges that one call takes.
_MAX_RANGES = 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class Memcpy:
    """Copies `nbytes` between two buffers of this process, as numpy and torch do: with the C library's memcpy."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = (huge_page_tensor((nbytes,), torch.uint8).numpy() for _ in range(2))

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


class MemcpyBlocks:
    """The same blocks that a pull moves, between two pools of this process: what is left to a perfect transport."""

    def __init__(self, shape: KvShape, ranges: np.ndarray) -> None:
        self._source, self._target = (
            huge_page_tensor((shape.pool_bytes,), torch.uint8).numpy().reshape(shape.pool_blocks, -1)
            for _ in range(2)
        )
        self._runs = [tuple(run) for run in (ranges // shape.block_bytes).tolist()]

    def __call__(self) -> None:
        for remote, local, count in self._runs:
            self._target[local : local + count] = self._source[remote : remote + count]


class ProcessVmReadv:
    """The same ranges that a pull moves, read from process `pid` with nothing in between."""

    def __init__(self, pid: int, remote_base: int, local_base: int, ranges: np.ndarray) -> None:
        self._pid = pid
        self._remote = _iovecs(remote_base, ranges[:, 0], ranges[:, 2])
        self._local = _iovecs(local_base, ranges[:, 1], ranges[:, 2])
        self._sizes = ranges[:, 2]

    def __call__(self) -> None:
        for start in range(0, len(self._sizes), _MAX_RANGES):
            part = slice(start, start + _MAX_RANGES)
            remote, local = self._remote[part], self._local[part]
            moved = _libc.process_vm_readv(
                self._pid,
                local.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_ulong(len(local)),
                remote.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_ulong(len(remote)),
                ctypes.c_ulong(0),
            )
            if moved < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if moved != int(self._sizes[part].sum()):
                raise OSError(f"process_vm_readv moved {moved} of {int(self._sizes[part].sum())} bytes")


def _iovecs(base: int, offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """struct iovec[]: an address and a size each."""
    vectors = np.empty((len(sizes), 2), np.uint64)
    vectors[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
    vectors[:, 1] = sizes
    return vectors
