"""How fast one prompt's KV moves from one embedded engine's pool into another's.

    pip install -e '.[embedded]'
    python benchmarks/transfer.py [--transport NIXL] [--shape 8b-bf16] [--device cuda]

Two processes with the engine's own KvSender and KvReceiver; blocks are read straight into place. The same rounds also
measure memcpy of as many bytes inside one process, and the bare system call that NIXL's `cma` uses; with
`--device cuda`, copies inside one GPU. A ratio is the median of the rounds' own ratios. Every byte is checked.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import queue
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from child_process import ChildProcess

from trtllm_disagg.engines.embedded.kv_transfer import transports
from trtllm_disagg.engines.embedded.kv_transfer.base import (
    KvLayout,
    KvTimeouts,
    common_runs,
)
from trtllm_disagg.engines.embedded.kv_transfer.peers import Peers
from trtllm_disagg.engines.embedded.kv_transfer.pull import KvReceiver, KvSender, Pull
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import huge_page_tensor
from trtllm_disagg.errors import ConfigError, KvTransferError
from trtllm_disagg.tools.bench.report import describe_machine, paired_ratios, spread
from trtllm_disagg.wire.kv_handle import decode_handle

CONTIGUOUS, SCATTERED = "contiguous", "scattered"
PATTERNS = (CONTIGUOUS, SCATTERED)
MEMCPY, ONE_BLOCK, NO_BLOCK = "memcpy", "pull of 1 block", "pull of 0 blocks"
#: The least percent of memcpy, and of process_vm_readv; the second one only for NIXL, which is built on that call.
OF_MEMCPY, OF_READV = {CONTIGUOUS: 85.0, SCATTERED: 65.0}, {CONTIGUOUS: 95.0, SCATTERED: 95.0}
#: IOV_MAX: the most ranges of one call.
_MAX_RANGES = 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_LEASE_SECONDS, _PULL_SECONDS = 600.0, 120.0
#: Knuth's multiplicative hash: neighbouring words of the fill differ in every byte.
_FILL_FACTOR = np.uint32(2654435761)


@dataclass(frozen=True)
class KvShape:
    """One prompt's KV in `prompt_blocks`, and pools with twice as many."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    prompt_blocks: int = 128
    tokens_per_block: int = 32

    @property
    def pool_blocks(self) -> int:
        return 2 * self.prompt_blocks

    @property
    def block_bytes(self) -> int:
        """K and V of one block in all layers."""
        token = 2 * self.layers * self.kv_heads * self.head_dim * getattr(torch, self.dtype).itemsize
        return int(self.tokens_per_block * token)

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_blocks * self.block_bytes

    def blocks(self, pattern: str, seed: int) -> list[int]:
        """CONTIGUOUS: one run. SCATTERED: no two neighbours in a row, the worst case of an allocator."""
        if pattern == CONTIGUOUS:
            start = self.prompt_blocks // 2
            return list(range(start, start + self.prompt_blocks))
        ids = np.arange(0, self.pool_blocks, 2) + np.random.default_rng(seed).integers(2)
        return [int(i) for i in np.random.default_rng(seed).permutation(ids)]

    def ranges(self, remote: list[int], local: list[int]) -> np.ndarray:
        """(n, 3) int64 rows (remote offset, local offset, bytes) in the pools, neighbours on both sides merged."""
        pairs = np.asarray(sorted(zip(remote, local, strict=True)), np.int64)
        runs = [(*pairs[start], length) for start, length in common_runs(pairs[:, 0], pairs[:, 1])]
        return np.asarray(runs, np.int64) * self.block_bytes


SHAPES = {
    "8b-bf16": KvShape("8b-bf16", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),  # Llama-3.1-8B
    "0.5b-fp32": KvShape("0.5b-fp32", layers=24, kv_heads=2, head_dim=64, dtype="float32"),  # Qwen2.5-0.5B
}


# -- both ends of a pull


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


@dataclass(frozen=True)
class Start:
    """What both ends are started with; the sender's process gets the shape as a dict."""

    backend: str
    shape: KvShape
    device: str


class End:
    """A transport and a pool of (blocks, layers, K and V, tokens, heads, head dimension)."""

    def __init__(self, backend: str, shape: KvShape, device: str) -> None:
        self.shape = shape
        self.transport = transports.create_transport(backend)
        token, dtype = (shape.kv_heads, shape.head_dim), getattr(torch, shape.dtype)
        size = (shape.pool_blocks, shape.layers, 2, shape.tokens_per_block, *token)
        self.pool = self.transport.allocate(size, dtype, torch.device(device))
        self.layout = KvLayout("bench", shape.layers, shape.tokens_per_block, *token, shape.dtype)


class Sender(End):
    """The object that the sender process serves."""

    def __init__(self, start: Any) -> None:
        super().__init__(start.backend, KvShape(**start.shape), start.device)
        fill(self.pool)
        blocks, timeouts = self.shape.pool_blocks, KvTimeouts(transfer=_LEASE_SECONDS)
        self._sender = KvSender(
            self.transport, self.layout, blocks, timeouts=timeouts, on_lease_ended=lambda: None
        )
        self._sender.start()
        self._ids = itertools.count(1)

    def address(self) -> tuple[int, int]:
        """(pid, address of the pool in that process)."""
        return os.getpid(), self.pool.data_ptr()

    def lease(self, blocks: list[int]) -> str:
        """Leases `blocks` and returns the handle in hex."""
        self._sender.leases.take_ended()
        tokens = self.shape.prompt_blocks * self.shape.tokens_per_block
        prompt = {"num_tokens": tokens, "seed": 0, "cached_tokens": 0}
        return self._sender.lease(next(self._ids), blocks, prompt_digest=bytes(16), **prompt).hex()

    def close(self) -> None:
        self._sender.close()
        self.transport.close()


class Receiver(End):
    """The receiving pool in this process and its KvReceiver."""

    def __init__(self, start: Start, sender: ChildProcess) -> None:
        super().__init__(start.backend, start.shape, start.device)
        self._call = sender.call
        self.transport.serve("bench-receiver")
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        timeouts = KvTimeouts(transfer=_PULL_SECONDS)
        self._peers = Peers(self.transport, self.layout, timeouts=timeouts, on_change=lambda: None)
        self._receiver = KvReceiver(self._peers, on_finished=lambda: self._woken.put(None))

    def pull(self, remote: Sequence[int], local: Sequence[int]) -> float:
        """Seconds from the engine's request for the blocks to its wake-up; the lease itself is not part of it."""
        handle = decode_handle(bytes.fromhex(self._call("lease", list(remote))))
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
        size = self.shape.block_bytes
        pool = self.pool.view(torch.uint8).cpu().numpy().reshape(self.shape.pool_blocks, -1)
        for there, here in zip(remote, local, strict=True):
            if not np.array_equal(pool[here], filled_bytes(there * size, size)):
                raise KvTransferError(f"block {there} did not arrive whole in {here}")

    def close(self) -> None:
        self._peers.close()
        self.transport.close()


@contextmanager
def connected(backend: str, shape: KvShape, device: str = "cpu") -> Iterator[tuple[ChildProcess, Receiver]]:
    """A sender process and a receiver. Raises EngineError if the sender cannot start."""
    start = Start(backend, shape, device)
    with ChildProcess(f"{os.path.abspath(__file__)}:Sender", start, {"OMP_NUM_THREADS": "1"}) as sender:
        sender.await_ready()
        receiver = Receiver(start, sender)
        try:
            yield sender, receiver
        finally:
            receiver.close()


# -- yardsticks


def copying(pools: Sequence[Any], ranges: np.ndarray) -> Callable[[], None]:
    """Copies the blocks of a pull of these `ranges` (see KvShape.ranges) from one pool of (blocks, bytes) to the other,
    as no transport can beat: by numpy, which is memcpy, or by the GPU's driver.
    """
    source, target = pools
    runs = [tuple(run) for run in (ranges // source.shape[1]).tolist()]

    def copy() -> None:
        for remote, local, count in runs:
            target[local : local + count] = source[remote : remote + count]
        if isinstance(target, torch.Tensor):
            torch.cuda.synchronize()

    return copy


def copy_pools(shape: KvShape, device: str) -> list[Any]:
    size = (shape.pool_blocks, shape.block_bytes)
    if device == "cuda":
        return [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    return [huge_page_tensor(size, torch.uint8).numpy() for _ in range(2)]


def reading(pid: int, remote_base: int, local_base: int, ranges: np.ndarray) -> Callable[[], None]:
    """Reads the ranges that a pull moves directly from the memory of process `pid`."""
    bases, sizes = (local_base, remote_base), ranges[:, 2]
    # struct iovec[]: an address and a size each.
    sides = [
        np.stack((ranges[:, side] + base, sizes), 1).astype(np.uint64)
        for side, base in zip((1, 0), bases, strict=True)
    ]

    def read() -> None:
        for start in range(0, len(sizes), _MAX_RANGES):
            parts = [side[start : start + _MAX_RANGES] for side in sides]
            pairs = [(part.ctypes.data_as(ctypes.c_void_p), ctypes.c_ulong(len(part))) for part in parts]
            wanted = int(parts[0][:, 1].sum())
            moved = _libc.process_vm_readv(pid, *itertools.chain(*pairs), ctypes.c_ulong(0))
            if moved < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if moved != wanted:
                raise OSError(f"process_vm_readv moved {moved} of {wanted} bytes")

    return read


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# -- the measurement


def memcpy_of(pattern: str) -> str:
    return f"memcpy of the blocks {pattern}"


def readv_of(pattern: str) -> str:
    return f"process_vm_readv {pattern}"


@dataclass(frozen=True)
class PullTimes:
    """Seconds by what was timed; values at the same index are of the same round."""

    shape: KvShape
    backend: str
    first: float
    #: By pattern, the number of ranges of a prompt's blocks after neighbours are merged.
    ranges: dict[str, int]
    seconds: dict[str, list[float]]
    device: str = "cpu"

    def rate(self, name: str) -> float:
        """GiB/s of the whole prompt's KV."""
        return self.shape.prompt_bytes / (1 << 30) / median(self.seconds[name])

    def share(self, name: str, yardstick: str = MEMCPY) -> float:
        """Percent of the yardstick's rate."""
        return 100 * median(paired_ratios(self.seconds[yardstick], self.seconds[name]))

    def verdicts(self) -> Iterator[tuple[str, float, float]]:
        """(what, percent, target) for each target."""
        for pattern in PATTERNS:
            yield f"{pattern} share of memcpy", self.share(pattern), OF_MEMCPY[pattern]
            if self.backend == "NIXL" and readv_of(pattern) in self.seconds:
                of_readv = self.share(pattern, readv_of(pattern))
                yield f"{pattern} share of process_vm_readv", of_readv, OF_READV[pattern]


def time_pulls(
    backend: str, shape: KvShape, rounds: int, say: Callable[[str], None], device: str
) -> PullTimes:
    """Times everything once in each round, in random order, and checks the bytes at the end."""
    order = random.Random(0)
    with connected(backend, shape, device) as (sender, receiver):
        pid, pool_address = sender.call("address")
        remote = {pattern: shape.blocks(pattern, seed=1) for pattern in PATTERNS}
        local = {pattern: shape.blocks(pattern, seed=2) for pattern in PATTERNS}
        ranges = {pattern: shape.ranges(remote[pattern], local[pattern]) for pattern in PATTERNS}
        first = receiver.pull(remote[CONTIGUOUS], local[CONTIGUOUS])
        pools, here = copy_pools(shape, device), receiver.pool.data_ptr()
        whole = np.array([[0, 0, shape.prompt_bytes]])
        timed: dict[str, Callable[[], float]] = {MEMCPY: partial(seconds_of, copying(pools, whole))}
        for pattern in PATTERNS:
            timed[memcpy_of(pattern)] = partial(seconds_of, copying(pools, ranges[pattern]))
            if device == "cpu":
                bare = reading(pid, pool_address, here, ranges[pattern])
                timed[readv_of(pattern)] = partial(seconds_of, bare)
            timed[pattern] = partial(receiver.pull, remote[pattern], local[pattern])
        timed |= {ONE_BLOCK: partial(receiver.pull, [3], [5]), NO_BLOCK: partial(receiver.pull, [], [])}
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
    return PullTimes(shape, backend, first, {p: len(r) for p, r in ranges.items()}, seconds, device)


def show(times: PullTimes) -> None:
    from rich.table import Table

    from trtllm_disagg.console import Console

    shape, console = times.shape, Console(paper=110)
    tokens = shape.prompt_blocks * shape.tokens_per_block
    size = f"{tokens} tokens, {shape.prompt_bytes / 2**20:.0f} MiB"
    title = f"{shape.name} over {times.backend}, {times.device}: {size}"
    table = Table("", "GiB/s", "% of memcpy", "% of readv", "spread", "descriptors", title=title, box=None)
    for name in (name for name in times.seconds if name not in (ONE_BLOCK, NO_BLOCK)):
        pattern = name.rpartition(" ")[2]
        readv = readv_of(pattern) if name in PATTERNS else ""
        of_readv = f"{times.share(name, readv):.0f}" if readv in times.seconds else ""
        row = (
            f"{times.rate(name):.2f}",
            f"{times.share(name):.0f}",
            of_readv,
            f"{spread(times.seconds[name]) / 2:.0%}",
        )
        table.add_row(f"pull {name}" if name in PATTERNS else name, *row, str(times.ranges.get(pattern, 1)))
    console.print(table)
    one, none = (1000 * median(times.seconds[name]) for name in (ONE_BLOCK, NO_BLOCK))
    console.print(
        f"A request is {shape.prompt_blocks} blocks of {shape.block_bytes >> 10} KiB. One block takes"
    )
    console.print(
        f"{one:.2f} ms, control messages alone {none:.2f} ms, the first pull {1000 * times.first:.0f} ms."
    )
    for what, percent, target in times.verdicts():
        console.print(
            f"{what}: {percent:.0f} %, target {target:g} %: {'met' if percent >= target else 'MISSED'}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add, every = parser.add_argument, list(transports.TRANSPORTS)
    add("--rounds", type=int, default=15, metavar="N", help="repetitions, each in another order")
    add("--transport", choices=every, nargs="+", default=every, help="how KV moves (default: all)")
    add("--shape", choices=SHAPES, nargs="+", default=list(SHAPES), help="KV of a model (default: all)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of both pools; cuda: on one GPU")
    add("--json", metavar="FILE", help="write every round's seconds")
    args = parser.parse_args(arguments)
    backends = [name for name in args.transport if args.device in transports.TRANSPORTS[name].devices]
    if not backends:
        allowed = f"with --device {args.device}: {', '.join(transports.on_gpus())}"
        raise SystemExit(str(ConfigError.bad_value("--transport", " ".join(args.transport), allowed)))
    if args.device == "cuda" and not torch.cuda.is_available():
        why = "cpu; torch sees no CUDA device here"
        raise SystemExit(str(ConfigError.bad_value("--device", args.device, why)))
    print(describe_machine(), torch.cuda.get_device_name() if args.device == "cuda" else "")
    results = []
    for shape in (SHAPES[name] for name in args.shape):
        for backend in backends:
            say = partial(print, file=sys.stderr, flush=True)
            results.append(time_pulls(backend, shape, args.rounds, say, args.device))
            show(results[-1])
    if args.json is not None:
        with open(args.json, "w") as file:
            json.dump([asdict(times) for times in results], file, indent=1)


if __name__ == "__main__":
    main()
