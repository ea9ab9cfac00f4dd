"""`trtllm-disagg bench transfer`: how fast one prompt's KV gets from one engine's pool into another's.

Two processes, the real KvSender and KvReceiver, blocks read straight into place. Beside it, in the same rounds:
memcpy of as many bytes inside one process, and the bare system call.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from trtllm_disagg.bench.figures import Figure, at_least, to_json
from trtllm_disagg.bench.kv_pulls import (
    MEMCPY,
    NO_BLOCK,
    ONE_BLOCK,
    PATTERNS,
    PullTimes,
    memcpy_of,
    pull_of,
    readv_of,
    time_pulls,
)
from trtllm_disagg.bench.kv_shapes import SHAPES
from trtllm_disagg.bench.machine import describe_machine, load
from trtllm_disagg.bench.plot import plot_transfer, require_matplotlib
from trtllm_disagg.bench.progress import Progress, wide_console
from trtllm_disagg.kv_transfer.transports import ON_ONE_HOST

#: Percent of memcpy that a pull should reach.
TARGETS = {"contiguous": 85.0, "scattered": 65.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print figures instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a PNG; needs matplotlib")
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
    if args.plot is not None:
        require_matplotlib()
    before = load()
    with Progress("transfer") as progress:
        results = [
            time_pulls(backend, SHAPES[shape], args.rounds, progress.say)
            for shape in args.shape
            for backend in args.transport
        ]
    figures = [figure for times in results for figure in figures_of(times)]
    if args.json:
        print(to_json(figures))
    else:
        _print(results, figures, before)
    if args.plot is not None:
        plot_transfer(results, args.plot)
    return 0


def figures_of(times: PullTimes) -> list[Figure]:
    prefix = f"{times.shape.name} {times.backend}"
    figures: list[Figure] = []
    for pattern in PATTERNS:
        pull = pull_of(pattern)
        figures += [
            Figure(f"{prefix} {pattern} rate", times.rate(pull).median, "GiB/s"),
            at_least(
                f"{prefix} {pattern} share of memcpy",
                times.share_of_memcpy(pull).median,
                "%",
                TARGETS[pattern],
            ),
            *(
                Figure(
                    f"{prefix} {yardstick.replace(',', '')} share of memcpy",
                    times.share_of_memcpy(yardstick).median,
                    "%",
                )
                for yardstick in (memcpy_of(pattern), readv_of(pattern))
            ),
            Figure(f"{prefix} {pattern} descriptors per request", times.ranges[pattern], "descriptors"),
        ]
    return [
        Figure(f"{prefix} memcpy rate", times.rate(MEMCPY).median, "GiB/s"),
        *figures,
        Figure(f"{prefix} blocks per request", times.shape.prompt_blocks, "blocks"),
        Figure(f"{prefix} one block", times.milliseconds(ONE_BLOCK).median, "ms"),
        Figure(f"{prefix} control round trip", times.milliseconds(NO_BLOCK).median, "ms"),
        Figure(f"{prefix} first pull", 1000 * times.first, "ms"),
    ]


def _print(results: Sequence[PullTimes], figures: Sequence[Figure], load_before: float) -> None:
    console = wide_console()
    console.print(f"{describe_machine()}; load {load_before:.1f} before, {load():.1f} after")
    for times in results:
        console.print(_table(times))
        console.print(_costs(times))
    missed = [figure for figure in figures if figure.missed]
    for figure in missed:
        console.print(f"missed: {figure.figure} {figure.value:.0f} {figure.unit}, target {figure.target}")
    if not missed:
        console.print("All targets are met.")


def _table(times: PullTimes) -> Table:
    shape = times.shape
    title = f"{shape.name} over {times.backend}: {shape.prompt_tokens} tokens, {shape.prompt_bytes / 2**20:.0f} MiB"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("GiB/s", "% of memcpy", "spread", "descriptors"):
        table.add_column(name, justify="right")
    for name in (MEMCPY, *(of(p) for p in PATTERNS for of in (memcpy_of, readv_of, pull_of))):
        share = times.share_of_memcpy(name)
        ranges = times.ranges.get(name.rpartition(" ")[2], 1)
        table.add_row(
            name,
            f"{times.rate(name).median:.2f}",
            f"{share.median:.0f}",
            f"±{share.spread / 2:.0%}",
            str(ranges),
        )
    return table


def _costs(times: PullTimes) -> str:
    shape = times.shape
    one, none = times.milliseconds(ONE_BLOCK).median, times.milliseconds(NO_BLOCK).median
    return (
        f"A request is {shape.prompt_blocks} blocks of {shape.block_bytes >> 10} KiB. A pull of one block "
        f"takes {one:.2f} ms, of none {none:.2f} ms, the first one of a connection {1000 * times.first:.0f} ms.\n"
    )
