"""Pulls a prompt's KV out of another process, through the same KvReceiver as the engine's, and times it."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_disagg.bench.figures import Sample, paired_ratio
from trtllm_disagg.bench.kv_sender import SenderProcess
from trtllm_disagg.bench.kv_shapes import KvShape, filled_bytes
from trtllm_disagg.bench.raw_copy import Memcpy, MemcpyBlocks, ProcessVmReadv
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.access import OneHost
from trtllm_disagg.kv_transfer.pull import KvReceiver, Pull
from trtllm_disagg.kv_transfer.transports import create_transport

PATTERNS = ("contiguous", "scattered")
MEMCPY = "memcpy"
ONE_BLOCK = "pull of 1 block"
NO_BLOCK = "pull of 0 blocks"
_PULL_SECONDS = 120.0


def pull_of(pattern: str) -> str:
    return f"pull, {pattern}"


def memcpy_of(pattern: str) -> str:
    return f"memcpy of the blocks, {pattern}"


def readv_of(pattern: str) -> str:
    return f"process_vm_readv, {pattern}"


class Receiver:
    """The receiving pool in this process and its KvReceiver."""

    def __init__(self, backend: str, shape: KvShape, sender: SenderProcess) -> None:
        self._shape = shape
        self._sender = sender
        self._transport = create_transport(backend, OneHost())
        self.pool = self._transport.allocate(
            shape.pool_shape, getattr(torch, shape.dtype), torch.device("cpu")
        )
        self._transport.serve("bench-receiver")
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._receiver = KvReceiver(
            self._transport,
            shape.layout,
            door=OneHost().door(),
            timeout_seconds=_PULL_SECONDS,
            on_finished=lambda: self._woken.put(None),
        )

    def pull(self, remote: Sequence[int], local: Sequence[int]) -> float:
        """Seconds from the engine's request for the blocks to its wake-up; the lease itself is not part of it."""
        handle = self._sender.lease(remote)
        started = time.perf_counter()
        self._receiver.start(Pull(request_id=0, handle=handle, remote=list(remote), local=list(local)))
        self._woken.get(timeout=_PULL_SECONDS)
        seconds = time.perf_counter() - started
        (pull,) = self._receiver.take_finished()
        if pull.error is not None:
            raise pull.error
        return seconds

    def require_arrived(self, remote: Sequence[int], local: Sequence[int]) -> None:
        """Raise KvTransferError unless every byte of these blocks is the one that the sender has there."""
        shape = self._shape
        pool = self.pool.view(torch.uint8).numpy().reshape(shape.pool_blocks, -1)
        for there, here in zip(remote, local, strict=True):
            if not np.array_equal(pool[here], filled_bytes(there * shape.block_bytes, shape.block_bytes)):
                raise KvTransferError(f"block {there} did not arrive whole in {here}")

    def close(self) -> None:
        self._receiver.close()
        self._transport.close()


@contextmanager
def connected(backend: str, shape: KvShape) -> Iterator[tuple[SenderProcess, Receiver]]:
    with SenderProcess(backend, shape) as sender:
        receiver = Receiver(backend, shape, sender)
        try:
            yield sender, receiver
        finally:
            receiver.close()


@dataclass(frozen=True, slots=True)
class PullTimes:
    """Seconds by what was timed; values at the same place are of the same round."""

    shape: KvShape
    backend: str
    first: float
    #: Ranges that remain of a prompt's blocks when neighbours are merged, by pattern.
    ranges: dict[str, int]
    seconds: dict[str, list[float]]

    def rate(self, name: str) -> Sample:
        """GiB/s of the whole prompt's KV."""
        gib = self.shape.prompt_bytes / (1 << 30)
        return Sample(tuple(gib / s for s in self.seconds[name]))

    def share_of_memcpy(self, name: str) -> Sample:
        """Percent."""
        ratio = paired_ratio(self.seconds[MEMCPY], self.seconds[name])
        return Sample(tuple(100 * value for value in ratio.values))

    def milliseconds(self, name: str) -> Sample:
        return Sample(tuple(1000 * s for s in self.seconds[name]))


def time_pulls(backend: str, shape: KvShape, rounds: int, say: Callable[[str], None]) -> PullTimes:
    """In each round everything once, in another order each time. The bytes are checked at the end."""
    order = random.Random(0)
    with connected(backend, shape) as (sender, receiver):
        remote = {pattern: shape.blocks(pattern, seed=1) for pattern in PATTERNS}
        local = {pattern: shape.blocks(pattern, seed=2) for pattern in PATTERNS}
        ranges = {pattern: shape.ranges(remote[pattern], local[pattern]) for pattern in PATTERNS}
        say(f"{shape.name}, {backend}: first pull")
        first = receiver.pull(remote["contiguous"], local["contiguous"])
        timed: dict[str, Callable[[], float]] = {MEMCPY: _timer(Memcpy(shape.prompt_bytes))}
        for pattern in PATTERNS:
            here, there = sender.serving, receiver.pool.data_ptr()
            raw = ProcessVmReadv(here.pid, here.pool_address, there, ranges[pattern])
            timed[memcpy_of(pattern)] = _timer(MemcpyBlocks(shape, ranges[pattern]))
            timed[readv_of(pattern)] = _timer(raw)
            timed[pull_of(pattern)] = lambda p=pattern: receiver.pull(remote[p], local[p])  # type: ignore[misc]
        timed[ONE_BLOCK] = lambda: receiver.pull([3], [5])
        timed[NO_BLOCK] = lambda: receiver.pull([], [])
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for number in range(-1, rounds):  # the first round warms up
            say(f"{shape.name}, {backend}: round {number + 1} of {rounds}")
            for name in order.sample(sorted(timed), len(timed)):
                taken = timed[name]()
                if number >= 0:
                    seconds[name].append(taken)
        for pattern in PATTERNS:
            receiver.pool.zero_()
            receiver.pull(remote[pattern], local[pattern])
            receiver.require_arrived(remote[pattern], local[pattern])
    return PullTimes(shape, backend, first, {p: len(r) for p, r in ranges.items()}, seconds)


def _timer(copy: Callable[[], None]) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        copy()
        return time.perf_counter() - started

    return timed
