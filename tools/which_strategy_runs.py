"""The runs of `bench strategies --quick` from which the page which-strategy is made: model-GPU pairs and workloads.

Each run is a command that can also be given by hand, and that resumes an interrupted run. Planned durations are 9 to
130 minutes. Where answers are long or first tokens fast, the modelled clock runs too fast for a conclusion on TTFT
itself, but slow enough for one on answers in time (docs/decisions/0028-software-in-a-conclusion.md).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.which_strategy_trace import write_trace
from trtllm_disagg.tools.bench import strategies
from trtllm_disagg.tools.bench.strategies.aiperf import AIPerf
from trtllm_disagg.tools.bench.strategies.records import RunDirectory
from trtllm_disagg.tools.bench.strategies.starting import runner_of_engines

#: Tokens that reach the client together, so that two cores can relay the answers of a fast clock. No token is generated
#: later; the first and the last one are sent at once.
_STREAM_INTERVAL = 64
#: For answers of thousands of tokens: the client gets only the first token and the end.
_LONG_ANSWERS = 8192


@dataclass(frozen=True)
class Pair:
    """A model and the GPUs of one worker."""

    model: str
    system: str
    #: Arguments that override engine_configs/modelled.
    arguments: Mapping[str, Any]
    #: TTFT of about three lone prompts of 8192 tokens: every arm keeps it at low rates, and none at all rates.
    slo: str = "ttft=1500,tpot=50"

    def override(self, stream_interval: int = _STREAM_INTERVAL) -> str:
        modelled = {"model": self.model, "system": self.system}
        return json.dumps({**self.arguments, "stream_interval": stream_interval, "modelled": modelled})


@dataclass(frozen=True)
class Run:
    pair: Pair
    workload: str
    #: Chosen so that the 20 ms which our own software adds to a first token, on two calm cores, are a small part of the
    #: SLO's limit; for rag, with its long prompts, a small part of TTFT itself.
    time_scale: float
    #: Requests of a point. Few suffice for rag, which prefill limits.
    requests: str = "auto"
    #: An SLO in place of the pair's, near what a lone request takes. By the page which-layout, separate workers should
    #: be better under it.
    tight_slo: str = ""
    stream_interval: int = _STREAM_INTERVAL

    @property
    def name(self) -> str:
        return f"{self.pair.model}-{self.pair.system}-{self.workload}" + ("-tight" if self.tight_slo else "")

    @property
    def slo(self) -> str:
        return self.tight_slo or self.pair.slo

    def argv(self, options: argparse.Namespace) -> list[str]:
        return [sys.executable, "-m", "trtllm_disagg", "bench", "strategies", *self.flags(options)]

    def flags(self, options: argparse.Namespace) -> list[str]:
        trace = ("--trace", str(options.measure / _TRACE)) if self.workload == "trace" else ()
        # The page shows the command without it.
        aiperf = ("--aiperf", str(options.aiperf.absolute())) if options.aiperf else ()
        return [
            *("--quick", *aiperf, "--model", str(options.model), "--out", str(options.measure / self.name)),
            *("--workloads", self.workload, *trace, "--requests", self.requests, "--slo", self.slo),
            *(
                "--time-scale",
                f"{self.time_scale:g}",
                "--override-engine-args",
                self.pair.override(self.stream_interval),
            ),
        ]

    def minutes(self, options: argparse.Namespace) -> float:
        """The planned duration."""
        parser = argparse.ArgumentParser()
        strategies.add_arguments(parser)
        args = parser.parse_args(self.flags(options))
        strategies.settle(args)
        with tempfile.TemporaryDirectory() as nowhere:
            runner = runner_of_engines(args, AIPerf(Path("aiperf")), RunDirectory(Path(nowhere)))
        return runner.progress().remaining_seconds() / 60


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
PAIRS = (_8B, _120B, _70B, _235B, _32B)
#: The file in the directory of the runs, the same for all pairs.
_TRACE = "trace.jsonl"

RUNS = (
    Run(_8B, "rag", 2.75, "14"),
    Run(_120B, "rag", 3, "14"),
    Run(_70B, "rag", 1.25, "14"),
    Run(_235B, "rag", 2, "14"),
    Run(_32B, "rag", 1.25, "14"),
    Run(_8B, "rag", 3, tight_slo="ttft=2000,tpot=14"),
    Run(_70B, "rag", 1.25, tight_slo="ttft=6000,tpot=20"),
    Run(_235B, "rag", 2, tight_slo="ttft=7000,tpot=21"),
    Run(_32B, "rag", 1.25, tight_slo="ttft=6000,tpot=24"),
    Run(_8B, "bursts", 6),
    Run(_120B, "bursts", 4),
    Run(_70B, "bursts", 3),
    Run(_235B, "bursts", 5),
    Run(_32B, "bursts", 3),
    Run(_8B, "agentic", 6),
    Run(_120B, "agentic", 3),
    Run(_70B, "agentic", 4),
    Run(_235B, "agentic", 5),
    Run(_32B, "agentic", 4),
    Run(_8B, "trace", 6),
    Run(_120B, "trace", 4),
    Run(_70B, "trace", 4),
    Run(_235B, "trace", 5),
    Run(_32B, "trace", 4),
    Run(_8B, "chat", 8),
    Run(_120B, "chat", 2),
    Run(_70B, "chat", 3),
    Run(_235B, "chat", 3),
    Run(_32B, "chat", 3),
    Run(_8B, "reasoning", 0.5, stream_interval=_LONG_ANSWERS),
    Run(_120B, "reasoning", 0.15, stream_interval=_LONG_ANSWERS),
    Run(_70B, "reasoning", 0.15, stream_interval=_LONG_ANSWERS),
    Run(_235B, "reasoning", 0.15, stream_interval=_LONG_ANSWERS),
    Run(_32B, "reasoning", 0.5, stream_interval=_LONG_ANSWERS),
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
    add(
        "--dry-run",
        action="store_true",
        help="print the commands and how long they should take, and run none",
    )


def measure(options: argparse.Namespace) -> None:
    """Makes all runs one after the other. A failed run is reported and the next one begins."""
    begin, longest = time.monotonic(), 0.0
    write_trace(options.measure / _TRACE)
    for run in _chosen(options):
        command = run.argv(options)
        begun = time.monotonic()
        if begun - begin + longest > options.minutes * 60:
            print(f"no time left for {run.name}; the same command goes on", flush=True)
            return
        print(shlex.join(command), flush=True)
        if options.dry_run:
            print(f"{run.name}: {run.minutes(options):.1f} min", flush=True)
            continue
        code = subprocess.run(command, check=False).returncode
        seconds = time.monotonic() - begun
        longest = max(longest, seconds)
        print(f"{run.name}: exit status {code} after {seconds / 60:.1f} min", flush=True)
        if code == 130:
            return


def _chosen(options: argparse.Namespace) -> Iterator[Run]:
    for run in RUNS:
        if options.only in run.name:
            yield run
