"""Measures how fast a prompt's KV moves between the pools of two embedded engines.

    pip install -e '.[embedded]'
    python -m benchmarks.transfer [--transport NIXL] [--shape 8b-bf16] [--device cuda]

Two processes use the engine's own KvSender and KvReceiver, which reads blocks in place. The same rounds also measure
memcpy of the same number of bytes inside one process, and the bare system call of NIXL's `cma`; with `--device cuda`,
copies inside one GPU. A ratio is the median of the rounds' ratios. Every byte is checked.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import queue
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.report import describe_machine, paired_ratios, spread
from trtllm_disagg.engines.embedded.kv_transfer import transports
from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout, KvTimeouts, common_runs
from trtllm_disagg.engines.embedded.kv_transfer.connections import PeerConnections
from trtllm_disagg.engines.embedded.kv_transfer.pull import KvReceiver, KvSender, Pull
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import huge_page_tensor
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.wire.kv_handle import decode_handle

CONTIGUOUS, SCATTERED = "contiguous", "scattered"
PATTERNS = (CONTIGUOUS, SCATTERED)
MEMCPY, ONE_BLOCK, NO_BLOCK = "memcpy", "pull of 1 block", "pull of 0 blocks"
#: Minimum percent of memcpy, and of process_vm_readv (only for NIXL, which is built on that call).
OF_MEMCPY, OF_READV = {CONTIGUOUS: 85.0, SCATTERED: 65.0}, {CONTIGUOUS: 95.0, SCATTERED: 95.0}
MEMCPY_OF = {pattern: f"memcpy of the blocks {pattern}" for pattern in PATTERNS}
READV_OF = {pattern: f"process_vm_readv {pattern}" for pattern in PATTERNS}
#: IOV_MAX: maximum ranges per call.
_MAX_RANGES = 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_LEASE_SECONDS, _PULL_SECONDS, _END_SECONDS = 600.0, 120.0, 10.0
#: Knuth's multiplicative hash, so that neighbouring words differ in every byte.
_FILL_FACTOR = np.uint32(2654435761)


@dataclass(frozen=True)
class KvShape:
    """One prompt's KV in `prompt_blocks` blocks, and pools with twice that number."""

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
        """Bytes of one block: K and V of all layers."""
        token = 2 * self.layers * self.kv_heads * self.head_dim * getattr(torch, self.dtype).itemsize
        return int(self.tokens_per_block * token)

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_blocks * self.block_bytes

    def blocks(self, pattern: str, seed: int) -> list[int]:
        """Block ids. CONTIGUOUS: one run. SCATTERED: no neighbours in a row, an allocator's worst case."""
        if pattern == CONTIGUOUS:
            start = self.prompt_blocks // 2
            return list(range(start, start + self.prompt_blocks))
        ids = np.arange(0, self.pool_blocks, 2) + np.random.default_rng(seed).integers(2)
        return [int(i) for i in np.random.default_rng(seed).permutation(ids)]

    def ranges(self, remote: list[int], local: list[int]) -> np.ndarray:
        """(n, 3) int64: remote offset, local offset, bytes. Merges blocks that are neighbours in both pools."""
        pairs = np.asarray(sorted(zip(remote, local, strict=True)), np.int64)
        runs = [(*pairs[start], length) for start, length in common_runs(pairs[:, 0], pairs[:, 1])]
        return np.asarray(runs, np.int64) * self.block_bytes


SHAPES = {
    "8b-bf16": KvShape("8b-bf16", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),  # Llama-3.1-8B
    "0.5b-fp32": KvShape("0.5b-fp32", layers=24, kv_heads=2, head_dim=64, dtype="float32"),  # Qwen2.5-0.5B
}


# -- both ends of a pull


def fill(pool: torch.Tensor) -> None:
    """Fill a pool with words that encode their position."""
    flat = pool.view(torch.uint8).view(-1)
    flat.copy_(torch.from_numpy(filled_bytes(0, len(flat))))


def filled_bytes(offset: int, count: int) -> np.ndarray:
    """The bytes that `fill` writes at `offset`. Arguments must be multiples of four."""
    words = np.arange(offset // 4, (offset + count) // 4, dtype=np.uint32) * _FILL_FACTOR
    return words.view(np.uint8)


class End:
    """A transport and a pool of (blocks, layers, K and V, tokens, heads, head dimension)."""

    def __init__(self, backend: str, shape: KvShape, device: str) -> None:
        self.shape = shape
        self.transport = transports.create_transport(backend)
        token, dtype = (shape.kv_heads, shape.head_dim), getattr(torch, shape.dtype)
        size = (shape.pool_blocks, shape.layers, 2, shape.tokens_per_block, *token)
        self.pool = self.transport.allocate(size, dtype, torch.device(device))
        self.layout = KvLayout("bench", shape.layers, shape.tokens_per_block, *token, shape.dtype)


def serve_sender(calls: Connection, backend: str, shape: KvShape, device: str) -> None:
    """The sender's process: sends the address of its filled pool, then a handle for each list of blocks."""
    torch.set_num_threads(1)
    end = End(backend, shape, device)
    fill(end.pool)
    blocks, timeouts = shape.pool_blocks, KvTimeouts(transfer=_LEASE_SECONDS)
    sender = KvSender(end.transport, end.layout, blocks, timeouts=timeouts, on_lease_ended=lambda: None)
    sender.start()
    calls.send(end.pool.data_ptr())
    tokens = {"num_tokens": shape.prompt_blocks * shape.tokens_per_block, "seed": 0, "cached_tokens": 0}
    with suppress(EOFError):  # the benchmark has ended
        for number in itertools.count(1):
            wanted = calls.recv()
            sender.leases.take_ended()
            calls.send(sender.lease(number, wanted, prompt_digest=bytes(16), **tokens))
    sender.close()
    end.transport.close()


class Receiver(End):
    """The receiving pool and its KvReceiver, in this process."""

    def __init__(self, calls: Connection, backend: str, shape: KvShape, device: str) -> None:
        super().__init__(backend, shape, device)
        self._calls = calls
        self.transport.serve("bench-receiver")
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        timeouts = KvTimeouts(transfer=_PULL_SECONDS)
        self._peers = PeerConnections(self.transport, self.layout, timeouts=timeouts, on_change=lambda: None)
        self._receiver = KvReceiver(self._peers, on_finished=lambda: self._woken.put(None))

    def pull(self, remote: Sequence[int], local: Sequence[int]) -> float:
        """Seconds from the engine's request for the blocks to its wake-up, without the lease."""
        self._calls.send(list(remote))
        handle = decode_handle(self._calls.recv())
        started = time.perf_counter()
        self._receiver.start(Pull(handle=handle, remote=list(remote), local=list(local)))
        # A pull ends after its timeout, with the reason.
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
                raise KvTransferError(f"block {there} did not arrive completely in {here}")

    def close(self) -> None:
        self._peers.close()
        self.transport.close()


@contextmanager
def connected(backend: str, shape: KvShape, device: str = "cpu") -> Iterator[tuple[int, int, Receiver]]:
    """Yield the sender's pid, its pool's address and a receiver. Raises KvTransferError if the sender cannot start."""
    spawn = multiprocessing.get_context("spawn")
    calls, theirs = spawn.Pipe()
    sender = spawn.Process(target=serve_sender, args=(theirs, backend, shape, device), daemon=True)
    sender.start()
    theirs.close()
    try:
        address = calls.recv()
        with closing(Receiver(calls, backend, shape, device)) as receiver:
            yield sender.pid or 0, address, receiver
    except EOFError:
        raise KvTransferError("the sender has ended; what it wrote to stderr says why") from None
    finally:
        calls.close()
        sender.join(_END_SECONDS)
        sender.kill()


# -- yardsticks


def copying(pools: Sequence[Any], ranges: np.ndarray) -> Callable[[], None]:
    """A copy of `ranges` (see KvShape.ranges) between two pools of (blocks, bytes), by memcpy (numpy) or the GPU's
    driver: no transport can be faster.
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
    """A direct read of a pull's ranges from the memory of process `pid`."""
    bases, sizes = (local_base, remote_base), ranges[:, 2]
    # struct iovec[]: pairs of address and size.
    ends = [
        np.stack((ranges[:, end] + base, sizes), 1).astype(np.uint64)
        for end, base in zip((1, 0), bases, strict=True)
    ]

    def read() -> None:
        for start in range(0, len(sizes), _MAX_RANGES):
            parts = [end[start : start + _MAX_RANGES] for end in ends]
            pairs = [(part.ctypes.data_as(ctypes.c_void_p), ctypes.c_ulong(len(part))) for part in parts]
            wanted = int(parts[0][:, 1].sum())
            moved = _libc.process_vm_readv(pid, *itertools.chain(*pairs), ctypes.c_ulong(0))
            if moved < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if moved != wanted:
                raise OSError(f"process_vm_readv moved {moved} of {wanted} bytes")

    return read


# -- the measurement


#: What was timed -> seconds, one value per round.
Times = dict[str, list[float]]


def percent(times: Times, name: str, yardstick: str = MEMCPY) -> float:
    """Percent of the yardstick's rate."""
    return 100 * median(paired_ratios(times[yardstick], times[name]))


def verdicts(times: Times, backend: str) -> Iterator[tuple[str, float, float]]:
    """Yield (name, percent, target) for each target."""
    for pattern in PATTERNS:
        yield f"{pattern} share of memcpy", percent(times, pattern), OF_MEMCPY[pattern]
        if backend == "NIXL" and READV_OF[pattern] in times:
            of_readv = percent(times, pattern, READV_OF[pattern])
            yield f"{pattern} share of process_vm_readv", of_readv, OF_READV[pattern]


def time_pulls(backend: str, shape: KvShape, device: str, rounds: int) -> Times:
    """Time everything once per round, in random order; check all bytes at the end."""
    order = random.Random(0)
    with connected(backend, shape, device) as (pid, pool_address, receiver):
        remote = {pattern: shape.blocks(pattern, seed=1) for pattern in PATTERNS}
        local = {pattern: shape.blocks(pattern, seed=2) for pattern in PATTERNS}
        pools, here = copy_pools(shape, device), receiver.pool.data_ptr()
        timed: dict[str, Callable[[], object]] = {
            MEMCPY: copying(pools, np.array([[0, 0, shape.prompt_bytes]]))
        }
        for pattern in PATTERNS:
            ranges = shape.ranges(remote[pattern], local[pattern])
            timed[MEMCPY_OF[pattern]] = copying(pools, ranges)
            if device == "cpu":
                timed[READV_OF[pattern]] = reading(pid, pool_address, here, ranges)
            timed[pattern] = partial(receiver.pull, remote[pattern], local[pattern])
        timed |= {ONE_BLOCK: partial(receiver.pull, [3], [5]), NO_BLOCK: partial(receiver.pull, [], [])}
        times: Times = {name: [] for name in timed}
        for number in range(-1, rounds):  # the first round warms up
            print(f"{shape.name}, {backend}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            for name in order.sample(sorted(timed), len(timed)):
                started = time.perf_counter()
                of_pull = timed[name]()
                duration = of_pull if isinstance(of_pull, float) else time.perf_counter() - started
                if number >= 0:
                    times[name].append(duration)
        for pattern in PATTERNS:
            receiver.pool.zero_()
            receiver.pull(remote[pattern], local[pattern])
            receiver.require_arrived(remote[pattern], local[pattern])
    return times


def show(times: Times, backend: str, shape: KvShape, device: str) -> None:
    size = f"{shape.prompt_bytes / 2**20:.0f} MiB in blocks of {shape.block_bytes >> 10} KiB"
    print(f"{shape.name} over {backend}, {device}: {size}")
    for name, seconds in times.items():
        shown = f"{1000 * median(seconds):.2f} ms"
        if name not in (ONE_BLOCK, NO_BLOCK):
            rate = shape.prompt_bytes / (1 << 30) / median(seconds)
            shown = f"{rate:6.2f} GiB/s, {percent(times, name):3.0f} % of memcpy"
        print(f"  {name:32}{shown}, spread {spread(seconds) / 2:.0%}")
    for what, share, target in verdicts(times, backend):
        print(f"  {what}: {share:.0f} %, target {target:g} %: {'met' if share >= target else 'MISSED'}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add, every = parser.add_argument, list(transports.TRANSPORTS)
    add("--rounds", type=int, default=15, metavar="N", help="rounds, each in another order")
    add("--transport", choices=every, nargs="+", default=every, help="how KV moves (default: all)")
    add("--shape", choices=SHAPES, nargs="+", default=list(SHAPES), help="models with such KV (default: all)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device of both pools; cuda: one GPU")
    add("--json", metavar="FILE", help="write each round's seconds as JSON")
    args = parser.parse_args(arguments)
    backends = [name for name in args.transport if args.device in transports.TRANSPORTS[name].devices]
    if not backends:
        parser.error(f"--transport: expected with --device {args.device}: {', '.join(transports.on_gpus())}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected cpu; torch sees no CUDA device here")
    print(describe_machine(), torch.cuda.get_device_name() if args.device == "cuda" else "")
    results = []
    for name, backend in itertools.product(args.shape, backends):
        times = time_pulls(backend, SHAPES[name], args.device, args.rounds)
        show(times, backend, SHAPES[name], args.device)
        results.append({"shape": name, "transport": backend, "device": args.device, "seconds": times})
    if args.json is not None:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
