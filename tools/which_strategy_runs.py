"""The runs that the page which-strategy is made of: model-GPU pairs and workloads, by `bench strategies --quick`.

Each run is a command that can be given by hand and goes on where it was cut off. The first ones take the least time
and tell the most: six to nine minutes each by their plans, later ones half an hour (chat) and hours (reasoning, whose
answers have 4096 tokens).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A model and the GPUs of one worker."""

    model: str
    system: str
    #: Over engine_configs/modelled.
    arguments: Mapping[str, Any]
    #: Some three times what a prompt of 8192 tokens takes alone: all arms can keep it, and none at any rate.
    slo: str = "ttft=1500,tpot=50"

    @property
    def override(self) -> str:
        return json.dumps({**self.arguments, "modelled": {"model": self.model, "system": self.system}})


@dataclass(frozen=True)
class Run:
    pair: Pair
    workload: str
    #: So that a first token takes 0.4 wall seconds also where prefill steps are half as long: twenty times what our own
    #: software takes on two calm cores.
    time_scale: float
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.pair.model}-{self.pair.system}-{self.workload}"

    def argv(self, options: argparse.Namespace) -> list[str]:
        out = options.measure / self.name
        return [
            *(sys.executable, "-m", "trtllm_disagg", "bench", "strategies", "--quick"),
            *("--model", str(options.model), "--out", str(out), "--workloads", self.workload),
            *(
                "--time-scale",
                f"{self.time_scale:g}",
                "--override-engine-args",
                self.pair.override,
                *self.more,
            ),
        ]


_8B = Pair("llama-3.1-8b", "h100_sxm", {}, "ttft=500,tpot=30")
_32B = Pair("qwen3-32b-fp8", "h100_sxm", {})
_70B = Pair("llama-3.1-70b-fp8", "h200_sxm", {"tensor_parallel_size": 2})
_120B = Pair("gpt-oss-120b", "b200_sxm", {}, "ttft=500,tpot=30")
_235B = Pair(
    "qwen3-235b-a22b-fp8",
    "h200_sxm",
    {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4},
    "ttft=1000,tpot=50",
)
#: Two bursts.
_BURSTS = ("--requests", "32")

RUNS = (
    Run(_8B, "rag", 3),
    Run(_120B, "rag", 3),
    Run(_70B, "rag", 1.5),
    Run(_235B, "rag", 2),
    Run(_32B, "rag", 1.5),
    # A request of a burst waits for those before it, so its first token takes longer than a lonely one's.
    Run(_120B, "bursts", 3, _BURSTS),
    Run(_70B, "bursts", 3, _BURSTS),
    Run(_32B, "bursts", 3, _BURSTS),
    Run(_235B, "bursts", 4, _BURSTS),
    *(Run(pair, "agentic", 12) for pair in (_120B, _70B, _32B)),
    Run(_235B, "agentic", 16),
    Run(_8B, "bursts", 8, _BURSTS),
    Run(_8B, "agentic", 32),
    *(Run(pair, "chat", 32) for pair in (_120B, _70B, _235B, _32B)),
    Run(_8B, "chat", 96),
    *(Run(pair, "reasoning", 12) for pair in (_120B, _70B, _235B, _32B)),
    Run(_8B, "reasoning", 32),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=Path(".cache/demo-model"),
        help="with a tokenizer (default: %(default)s)",
    )
    add("--aiperf", type=Path, help="AIPerf's command")
    add("--minutes", type=float, default=50.0, help="no run begins that may end later (default: %(default)s)")
    add("--only", default="", metavar="TEXT", help="runs with it in their names: llama-3.1-8b, rag, ...")
    add("--dry-run", action="store_true", help="say the commands, and run none")


def measure(options: argparse.Namespace) -> None:
    """One after the other. A run that fails is said, and the next one begins."""
    begin, longest = time.monotonic(), 0.0
    for run in _chosen(options):
        command = run.argv(options)
        begun = time.monotonic()
        if begun - begin + longest > options.minutes * 60:
            print(f"no time left for {run.name}; the same command goes on", flush=True)
            return
        print(shlex.join(command), flush=True)
        if options.dry_run:
            continue
        code = subprocess.run(command, check=False, env=_with_aiperf(options.aiperf)).returncode
        seconds = time.monotonic() - begun
        longest = max(longest, seconds)
        print(f"{run.name}: exit status {code} after {seconds / 60:.1f} min", flush=True)
        if code == 130:
            return


def _with_aiperf(given: Path | None) -> dict[str, str]:
    """Found in PATH: its place on this machine is nothing for the page, which has the command."""
    more = f"{os.pathsep}{given.parent.absolute()}" if given else ""
    return os.environ | {"PATH": os.environ["PATH"] + more}


def _chosen(options: argparse.Namespace) -> Iterator[Run]:
    for run in RUNS:
        if options.only in run.name:
            yield run
