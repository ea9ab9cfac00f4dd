"""`trtllm-disagg bench transfer`: how fast one prompt's KV gets from one engine's pool into another's.

Two processes, the real KvSender and KvReceiver, blocks read straight into place. Beside it, in the same rounds:
memcpy of as many bytes inside one process, and the bare system call.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from trtllm_disagg.bench.figures import Figure, Sample, at_least, paired_ratio
from trtllm_disagg.bench.kv_ends import SHAPES, KvShape, connected
from trtllm_disagg.bench.plot import Bars
from trtllm_disagg.bench.raw_copy import Memcpy, MemcpyBlocks, ProcessVmReadv
from trtllm_disagg.bench.report import Say, add_output_arguments, run_benchmark, table
from trtllm_disagg.kv_transfer.choose import ON_ONE_HOST

#: Percent of memcpy that a pull should reach.
TARGETS = {"contiguous": 85.0, "scattered": 65.0}
PATTERNS = tuple(TARGETS)
#: Percent of the bare system call, for the transport that is built on it: on some CPUs that is far from memcpy.
READV_TARGET = 95.0
BUILT_ON_READV = "NIXL"
MEMCPY = "memcpy"
ONE_BLOCK = "pull of 1 block"
NO_BLOCK = "pull of 0 blocks"


def pull_of(pattern: str) -> str:
    return f"pull, {pattern}"


def memcpy_of(pattern: str) -> str:
    return f"memcpy of the blocks, {pattern}"


def readv_of(pattern: str) -> str:
    return f"process_vm_readv, {pattern}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--transport",
        choices=ON_ONE_HOST,
        nargs="+",
        default=list(ON_ONE_HOST),
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        nargs="+",
        default=list(SHAPES),
        help="whose KV: layers and heads of Llama-3.1-8B, of Qwen2.5-0.5B (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Exit status 0. Raises KvTransferError when a byte arrives wrong."""
    pairs = [(backend, SHAPES[shape]) for shape in args.shape for backend in args.transport]
    run_benchmark(
        "transfer",
        args,
        lambda say: [time_pulls(backend, shape, args.rounds, say) for backend, shape in pairs],
        lambda results: [figure for times in results for figure in figures_of(times)],
        print_tables,
        panels_of,
    )
    return 0


@dataclass(frozen=True, slots=True)
class PullTimes:
    """Seconds by what was timed; values at the same place are of the same round."""

    shape: KvShape
    backend: str
    first: float
    #: Ranges that remain of a prompt's blocks when neighbours are merged, by pattern.
    ranges: dict[str, int]
    seconds: dict[str, list[float]]

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.backend}"

    def rate(self, name: str) -> Sample:
        """GiB/s of the whole prompt's KV."""
        gib = self.shape.prompt_bytes / (1 << 30)
        return Sample(tuple(gib / s for s in self.seconds[name]))

    def share(self, name: str, yardstick: str = MEMCPY) -> Sample:
        """Percent of the yardstick's rate."""
        return paired_ratio(self.seconds[yardstick], self.seconds[name], 100.0)

    def milliseconds(self, name: str) -> float:
        return 1000 * Sample.of(self.seconds[name]).median


def time_pulls(backend: str, shape: KvShape, rounds: int, say: Say) -> PullTimes:
    """In each round everything once, in another order each time. The bytes are checked at the end."""
    order = random.Random(0)
    with connected(backend, shape) as (sender, receiver):
        pid, pool_address = sender.call("address")
        remote = {pattern: shape.blocks(pattern, seed=1) for pattern in PATTERNS}
        local = {pattern: shape.blocks(pattern, seed=2) for pattern in PATTERNS}
        ranges = {pattern: shape.ranges(remote[pattern], local[pattern]) for pattern in PATTERNS}
        say(f"{shape.name}, {backend}: first pull")
        first = receiver.pull(remote["contiguous"], local["contiguous"])
        timed: dict[str, Callable[[], float]] = {MEMCPY: _timer(Memcpy(shape.prompt_bytes))}
        for pattern in PATTERNS:
            raw = ProcessVmReadv(pid, pool_address, receiver.pool.data_ptr(), ranges[pattern])
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


def figures_of(times: PullTimes) -> list[Figure]:
    name = times.name
    return [
        Figure(f"{name} memcpy rate", times.rate(MEMCPY).median, "GiB/s"),
        *(figure for pattern in PATTERNS for figure in _pattern_figures(times, pattern)),
        Figure(f"{name} blocks per request", times.shape.prompt_blocks, "blocks"),
        Figure(f"{name} one block", times.milliseconds(ONE_BLOCK), "ms"),
        Figure(f"{name} control round trip", times.milliseconds(NO_BLOCK), "ms"),
        Figure(f"{name} first pull", 1000 * times.first, "ms"),
    ]


def _pattern_figures(times: PullTimes, pattern: str) -> list[Figure]:
    name, pull, readv = f"{times.name} {pattern}", pull_of(pattern), readv_of(pattern)
    of_readv = f"{name} share of process_vm_readv", times.share(pull, readv).median, "%"
    yardsticks = (memcpy_of(pattern), readv)
    return [
        Figure(f"{name} rate", times.rate(pull).median, "GiB/s"),
        at_least(f"{name} share of memcpy", times.share(pull).median, "%", TARGETS[pattern]),
        at_least(*of_readv, READV_TARGET) if times.backend == BUILT_ON_READV else Figure(*of_readv),
        *(
            Figure(f"{times.name} {each.replace(',', '')} share of memcpy", times.share(each).median, "%")
            for each in yardsticks
        ),
        Figure(f"{name} descriptors per request", times.ranges[pattern], "descriptors"),
    ]


def print_tables(console: Console, results: Sequence[PullTimes]) -> None:
    for times in results:
        shape = times.shape
        console.print(_table(times))
        console.print(
            f"A request is {shape.prompt_blocks} blocks of {shape.block_bytes >> 10} KiB. A pull of one block "
            f"takes {times.milliseconds(ONE_BLOCK):.2f} ms, of none {times.milliseconds(NO_BLOCK):.2f} ms, "
            f"the first one of a connection {1000 * times.first:.0f} ms.\n"
        )


def _table(times: PullTimes) -> Table:
    shape = times.shape
    size = f"{shape.prompt_tokens} tokens, {shape.prompt_bytes / 2**20:.0f} MiB"
    headers = ("", ">GiB/s", ">% of memcpy", ">% of readv", ">spread", ">descriptors")
    shown = table(f"{shape.name} over {times.backend}: {size}", headers)
    for name in (MEMCPY, *(of(p) for p in PATTERNS for of in (memcpy_of, readv_of, pull_of))):
        share, pattern = times.share(name), name.rpartition(" ")[2]
        of_readv = f"{times.share(name, readv_of(pattern)).median:.0f}" if pattern in PATTERNS else ""
        shown.add_row(
            name,
            f"{times.rate(name).median:.2f}",
            f"{share.median:.0f}",
            of_readv,
            f"±{share.spread / 2:.0%}",
            str(times.ranges.get(pattern, 1)),
        )
    return shown


def panels_of(results: Sequence[PullTimes]) -> list[Bars]:
    bars = {
        name: {f"{times.shape.name}\n{times.backend}": times.rate(name).median for times in results}
        for name in (MEMCPY, *(of(p) for p in PATTERNS for of in (readv_of, pull_of)))
    }
    return [Bars("KV pull between two processes, GiB/s", bars)]
