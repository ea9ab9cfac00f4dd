"""Both ends of `bench transfer`: a sender process with a filled pool, and a receiving pool in this process; and the
baselines of a pull: memcpy inside one process or one GPU, and the system call that NIXL's `cma` uses.

The pools have the shapes of real models. The engine's own KvSender and KvReceiver lease and pull the blocks.
"""

from __future__ import annotations

import ctypes
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trtllm_disagg.engines.embedded.kv_transfer.base import KvTimeouts
from trtllm_disagg.engines.embedded.kv_transfer.peers import Peers
from trtllm_disagg.engines.embedded.kv_transfer.pull import KvReceiver, KvSender, Pull
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import huge_page_tensor
from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.tools.bench.child_process import ChildProcess
from trtllm_disagg.tools.bench.kv_shapes import KvShape
from trtllm_disagg.wire.kv_handle import decode_handle

#: IOV_MAX: the most ranges of one call.
_MAX_RANGES = 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_LEASE_SECONDS = 600.0
_PULL_SECONDS = 120.0
#: Knuth's multiplicative hash: neighbouring words of the fill differ in every byte.
_FILL_FACTOR = np.uint32(2654435761)


def fill(pool: torch.Tensor) -> None:
    """Fills a pool with words that encode their own position."""
    flat, step = pool.view(torch.uint8).view(-1), 4 << 20
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        part.copy_(torch.from_numpy(filled_bytes(start, len(part))))


def filled_bytes(offset: int, count: int) -> np.ndarray:
    """The bytes that `fill` writes at `offset`. Both arguments are multiples of four."""
    words = np.arange(offset // 4, (offset + count) // 4, dtype=np.uint32) * _FILL_FACTOR
    return words.view(np.uint8)


@dataclass(frozen=True, slots=True)
class SenderStart:
    backend: str
    shape: KvShape
    device: str


class Sender:
    """The object that the sender process serves (child_main.py)."""

    def __init__(self, start: SimpleNamespace) -> None:
        self._shape = shape = KvShape(**start.shape)
        self._transport = create_transport(start.backend)
        self._pool = shape.pool_of(self._transport, start.device)
        fill(self._pool)
        self._sender = KvSender(
            self._transport,
            shape.layout,
            shape.pool_blocks,
            timeouts=KvTimeouts(transfer=_LEASE_SECONDS),
            on_lease_ended=lambda: None,
        )
        self._sender.start()
        self._leases = 0

    def address(self) -> tuple[int, int]:
        """(pid, address of the pool in that process)."""
        return os.getpid(), self._pool.data_ptr()

    def lease(self, blocks: list[int]) -> str:
        """Leases `blocks` and returns the handle in hex."""
        self._sender.leases.take_ended()
        self._leases += 1
        handle = self._sender.lease(
            self._leases,
            blocks,
            prompt_digest=bytes(16),
            num_tokens=self._shape.prompt_tokens,
            seed=0,
            cached_tokens=0,
        )
        return handle.hex()

    def close(self) -> None:
        self._sender.close()
        self._transport.close()


class Receiver:
    """The receiving pool in this process and its KvReceiver."""

    def __init__(self, backend: str, shape: KvShape, device: str, sender: ChildProcess) -> None:
        self._shape = shape
        self._sender = sender
        self._transport = create_transport(backend)
        self.pool = shape.pool_of(self._transport, device)
        self._transport.serve("bench-receiver")
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._peers = Peers(
            self._transport,
            shape.layout,
            timeouts=KvTimeouts(transfer=_PULL_SECONDS),
            on_change=lambda: None,
        )
        self._receiver = KvReceiver(self._peers, on_finished=lambda: self._woken.put(None))

    def pull(self, remote: Sequence[int], local: Sequence[int]) -> float:
        """Seconds from the engine's request for the blocks to its wake-up; the lease itself is not part of it."""
        handle = decode_handle(bytes.fromhex(self._sender.call("lease", list(remote))))
        started = time.perf_counter()
        self._receiver.start(Pull(handle=handle, remote=list(remote), local=list(local)))
        # The pull ends by itself after its timeout, with the reason.
        self._woken.get(timeout=2 * _PULL_SECONDS)
        seconds = time.perf_counter() - started
        (pull,) = self._receiver.take_finished()
        if pull.outcome.error is not None:
            raise pull.outcome.error
        return seconds

    def require_arrived(self, remote: Sequence[int], local: Sequence[int]) -> None:
        """Raises KvTransferError unless every byte of these blocks equals the sender's."""
        shape = self._shape
        pool = self.pool.view(torch.uint8).cpu().numpy().reshape(shape.pool_blocks, -1)
        for there, here in zip(remote, local, strict=True):
            if not np.array_equal(pool[here], filled_bytes(there * shape.block_bytes, shape.block_bytes)):
                raise KvTransferError(f"block {there} did not arrive whole in {here}")

    def close(self) -> None:
        self._peers.close()
        self._transport.close()


@contextmanager
def connected(backend: str, shape: KvShape, device: str = "cpu") -> Iterator[tuple[ChildProcess, Receiver]]:
    """A sender process and a receiver. Raises KvTransferError if the sender cannot start."""
    factory, start = f"{__name__}:Sender", SenderStart(backend, shape, device)
    with ChildProcess(factory, start, {"OMP_NUM_THREADS": "1"}, failure=KvTransferError) as sender:
        sender.await_ready()
        receiver = Receiver(backend, shape, device, sender)
        try:
            yield sender, receiver
        finally:
            receiver.close()


class CopyPools:
    """Two pools in this process, or on one GPU, and copies between them that no transport can beat: numpy's, which are
    memcpy, or those of the GPU's driver.
    """

    def __init__(self, shape: KvShape, device: str = "cpu") -> None:
        self._block_bytes, self._is_on_gpu = shape.block_bytes, device == "cuda"
        self.source, self.target = (self._pool(shape) for _ in range(2))

    def _pool(self, shape: KvShape) -> Any:
        if self._is_on_gpu:
            return torch.zeros((shape.pool_blocks, shape.block_bytes), dtype=torch.uint8, device="cuda")
        return huge_page_tensor((shape.pool_bytes,), torch.uint8).numpy().reshape(shape.pool_blocks, -1)

    def copying(self, ranges: np.ndarray) -> Callable[[], None]:
        """Copies the blocks that a pull of these `ranges` (see KvShape.ranges) moves, and waits for the copies."""
        runs = [tuple(run) for run in (ranges // self._block_bytes).tolist()]

        def copy() -> None:
            for remote, local, count in runs:
                self.target[local : local + count] = self.source[remote : remote + count]
            if self._is_on_gpu:
                torch.cuda.synchronize()

        return copy


class ProcessVmReadv:
    """Reads the ranges that a pull moves directly from the memory of process `pid`."""

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
