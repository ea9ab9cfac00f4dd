"""`trtllm-disagg bench transfer`: how fast one prompt's KV moves from one engine's pool into another's.

Two processes with the real KvSender and KvReceiver; blocks are read straight into place. The same rounds also measure
memcpy of as many bytes inside one process, and the bare system call; with `--device cuda` copies inside one GPU.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trtllm_disagg.config.settings import positive_up_to
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.bench.figures import Column, Figure, Grid, Sample, Section, paired_ratio
from trtllm_disagg.tools.bench.kv_shapes import SHAPES, TRANSPORTS, KvShape
from trtllm_disagg.tools.bench.machine import seconds_of
from trtllm_disagg.tools.bench.report import Say, add_choice, add_number, add_output_arguments, run_benchmark

if TYPE_CHECKING:
    from trtllm_disagg.cli import Parser

PATTERNS = ("contiguous", "scattered")
MEMCPY = "memcpy"
ONE_BLOCK = "pull of 1 block"
NO_BLOCK = "pull of 0 blocks"


def memcpy_of(pattern: str) -> str:
    return f"memcpy of the blocks {pattern}"


def readv_of(pattern: str) -> str:
    return f"process_vm_readv {pattern}"


def add_arguments(parser: Parser) -> None:
    add_output_arguments(parser)
    add_number(parser, "--rounds", 15, "repetitions, each in another order", type=positive_up_to(10_000))
    add_choice(parser, "--transport", TRANSPORTS, "how KV moves")
    add_choice(
        parser, "--shape", SHAPES, "the KV of a model: layers and heads of Llama-3.1-8B, of Qwen2.5-0.5B"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where both pools are; cuda: on one GPU, and only transports that reach it (default: cpu)",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Exit status 0. Raises KvTransferError when a byte arrives wrong, ConfigError when there is no GPU."""
    from trtllm_disagg.engines.embedded.kv_transfer import transports

    device: str = args.device
    backends = [name for name in args.transport if device in transports.TRANSPORTS[name].devices]
    if not backends:
        raise ConfigError.bad_value(
            "--transport",
            " ".join(args.transport),
            f"with --device {device}: {', '.join(transports.on_gpus())}",
        )
    require_device(device)
    pairs = [(backend, SHAPES[shape]) for shape in args.shape for backend in backends]
    run_benchmark(
        "transfer",
        args,
        lambda say: [time_pulls(backend, shape, args.rounds, say, device) for backend, shape in pairs],
        lambda results: [section_of(times, name_of(device)) for times in results],
    )
    return ExitCode.DONE


def require_device(device: str) -> None:
    """Raises ConfigError for a GPU that torch does not see."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError.bad_value("--device", device, "cpu; torch sees no CUDA device here")


def name_of(device: str) -> str:
    """A GPU's name; empty for the CPU."""
    if device == "cpu":
        return ""
    import torch

    return torch.cuda.get_device_name(device)


@dataclass(frozen=True, slots=True)
class PullTimes:
    """Seconds by what was timed; values at the same index are of the same round."""

    shape: KvShape
    backend: str
    first: float
    #: By pattern, the number of ranges of a prompt's blocks after neighbours are merged.
    ranges: dict[str, int]
    seconds: dict[str, list[float]]
    device: str = "cpu"

    @property
    def name(self) -> str:
        on_gpu = f" {self.device}" if self.device != "cpu" else ""
        return f"{self.shape.name} {self.backend}{on_gpu}"

    def rate(self, name: str) -> Sample:
        """GiB/s of the whole prompt's KV."""
        gib = self.shape.prompt_bytes / (1 << 30)
        return Sample(tuple(gib / s for s in self.seconds[name]))

    def share(self, name: str, yardstick: str = MEMCPY) -> Sample:
        """Percent of the yardstick's rate."""
        return paired_ratio(self.seconds[yardstick], self.seconds[name], 100.0)

    def milliseconds(self, name: str) -> float:
        return 1000 * Sample.of(self.seconds[name]).median


def time_pulls(backend: str, shape: KvShape, rounds: int, say: Say, device: str = "cpu") -> PullTimes:
    """Times everything once in each round, in random order, and checks the bytes at the end."""
    # Imported here because `--help` needs no torch.
    import numpy as np

    from trtllm_disagg.tools.bench.kv_ends import CopyPools, ProcessVmReadv, connected

    order = random.Random(0)
    with connected(backend, shape, device) as (sender, receiver):
        pid, pool_address = sender.call("address")
        remote = {pattern: shape.blocks(pattern, seed=1) for pattern in PATTERNS}
        local = {pattern: shape.blocks(pattern, seed=2) for pattern in PATTERNS}
        ranges = {pattern: shape.ranges(remote[pattern], local[pattern]) for pattern in PATTERNS}
        say(f"{shape.name}, {backend}: first pull")
        first = receiver.pull(remote["contiguous"], local["contiguous"])
        pools = CopyPools(shape, device)
        whole = np.array([[0, 0, shape.prompt_bytes]])
        timed: dict[str, Callable[[], float]] = {MEMCPY: partial(seconds_of, pools.copying(whole))}
        for pattern in PATTERNS:
            timed[memcpy_of(pattern)] = partial(seconds_of, pools.copying(ranges[pattern]))
            if device == "cpu":
                raw = ProcessVmReadv(pid, pool_address, receiver.pool.data_ptr(), ranges[pattern])
                timed[readv_of(pattern)] = partial(seconds_of, raw)
            timed[pattern] = partial(receiver.pull, remote[pattern], local[pattern])
        timed[ONE_BLOCK] = partial(receiver.pull, [3], [5])
        timed[NO_BLOCK] = partial(receiver.pull, [], [])
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for number in range(-1, rounds):  # the first round warms up
            round_now = f"round {number + 1} of {rounds}" if number >= 0 else "warming up"
            say(f"{shape.name}, {backend}: {round_now}")
            for name in order.sample(sorted(timed), len(timed)):
                taken = timed[name]()
                if number >= 0:
                    seconds[name].append(taken)
        for pattern in PATTERNS:
            receiver.pool.zero_()
            receiver.pull(remote[pattern], local[pattern])
            receiver.require_arrived(remote[pattern], local[pattern])
    return PullTimes(shape, backend, first, {p: len(r) for p, r in ranges.items()}, seconds, device)


_COLUMNS = (
    Column("rate", "GiB/s", header="GiB/s"),
    Column("share of memcpy", "%", ".0f", "% of memcpy"),
    Column("share of process_vm_readv", "%", ".0f", "% of readv"),
    Column("spread", form=".0%"),
    Column("descriptors per request", "descriptors", ".0f", "descriptors"),
)


def section_of(times: PullTimes, gpu: str = "") -> Section:
    """`gpu` names the one that both pools are on."""
    name, shape = times.name, times.shape
    place = f" on one {gpu}" if gpu else ""
    one, none, first = times.milliseconds(ONE_BLOCK), times.milliseconds(NO_BLOCK), 1000 * times.first
    size = f"{shape.prompt_tokens} tokens, {shape.prompt_bytes / 2**20:.0f} MiB"
    # In names of figures, a pull is called by its pattern alone.
    wanted = (MEMCPY, *(row for p in PATTERNS for row in (memcpy_of(p), readv_of(p), p)))
    rows = [row for row in wanted if row in times.seconds]
    return Section(
        "Besides",
        [
            Grid(
                f"{shape.name} over {times.backend}{place}: {size}",
                ("",),
                _COLUMNS,
                {(f"pull {row}" if row in PATTERNS else row, row): _cells(times, row) for row in rows},
                f"{name} {{1}} {{column}}",
            )
        ],
        [f"A request is {shape.prompt_blocks} blocks of {shape.block_bytes >> 10} KiB."],
        [
            Figure(f"{name} blocks per request", shape.prompt_blocks, "blocks"),
            Figure(f"{name} one block", one, "ms"),
            Figure(f"{name} control round trip", none, "ms"),
            Figure(f"{name} first pull", first, "ms"),
        ],
    )


def _cells(times: PullTimes, row: str) -> dict[str, float | str]:
    share, pattern = times.share(row), row.rpartition(" ")[2]
    cells: dict[str, float | str] = {
        "rate": times.rate(row).median,
        "share of memcpy": share.median,
        "spread": share.spread / 2,
        "descriptors per request": times.ranges.get(pattern, 1),
    }
    if pattern in PATTERNS and readv_of(pattern) in times.seconds:
        cells["share of process_vm_readv"] = times.share(row, readv_of(pattern)).median
    return cells
