"""Compares monolithic and disaggregated serving: the same requests on the same two cores.

    pip install -e '.[embedded]'
    python -m benchmarks.scenarios [--scale seed 1k] [--scenario long_prompts] [--json]

Engines only, without Dynamo. Samples at temperature 1 with seeds: both must give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.models import NANOGPT_DIRECTORY, random_checkpoint, vocab_size
from benchmarks.report import (
    Column,
    Figure,
    Grid,
    Rounds,
    Say,
    Section,
    add_choice,
    add_number,
    add_output_arguments,
    end_program,
    rotated,
    run_benchmark,
    spread,
)
from benchmarks.seed_scenarios import SCALES, SEED_RATIOS, SEED_SCENARIOS, Scale, Scenario
from benchmarks.servers import (
    AS_IN_THE_POST,
    DISAGG,
    DISAGGREGATED,
    MODES,
    Bench,
    Server,
    start_servers,
)
from trtllm_disagg.common.cli import Parser
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.model_directory import model_directory
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.flag_types import positive_up_to

if TYPE_CHECKING:
    from benchmarks.servers import Answer
    from trtllm_disagg.engines.embedded import SamplingParams


@dataclass(slots=True)
class Trace:
    """The tokens of one request and their times, in seconds since the start of the run."""

    arrived: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


def measures_of(traces: Sequence[Trace]) -> dict[str, float]:
    """The quantities of _COLUMNS, in their units, of one repetition of a mode."""
    import numpy as np

    wall = max(trace.times[-1] for trace in traces)
    ttft = [1000 * (trace.times[0] - trace.arrived) for trace in traces]
    latency = [1000 * (trace.times[-1] - trace.arrived) for trace in traces]
    gaps = [1000 * (b - a) for trace in traces for a, b in itertools.pairwise(trace.times)]
    return {
        "wall": wall,
        "throughput": sum(len(trace.tokens) for trace in traces) / wall,
        "ttft": float(np.mean(ttft)),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "itl_p99": float(np.percentile(gaps, 99)) if gaps else 0.0,
        "latency": float(np.mean(latency)),
    }


async def drive(answer: Answer, scenario: Scenario, prompts: Sequence[list[int]]) -> list[Trace]:
    """Send each request at its time, also while earlier ones run."""
    started = time.perf_counter()

    async def one(number: int, prompt: list[int]) -> Trace:
        trace = Trace(arrived=number * scenario.gap / 1000)
        await asyncio.sleep(max(0.0, trace.arrived - (time.perf_counter() - started)))
        async for tokens in answer(prompt, _sampling(number, scenario)):
            trace.times += [time.perf_counter() - started] * len(tokens)
            trace.tokens += tokens
        return trace

    return list(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))


def mismatched_tokens(expected: Sequence[Trace], actual: Sequence[Trace]) -> int:
    """Number of positions at which two runs of the same requests differ. A missing token counts."""
    return sum(
        a != b
        for one, other in zip(expected, actual, strict=True)
        for a, b in itertools.zip_longest(one.tokens, other.tokens)
    )


def _sampling(number: int, scenario: Scenario) -> SamplingParams:
    from trtllm_disagg.engines.embedded import SamplingParams

    return SamplingParams(
        max_tokens=scenario.output_tokens,
        temperature=1.0,
        seed=1000 + number,
        ignore_eos=True,
        detokenize=False,
    )


_COLUMNS = (
    Column("wall", "s", ".3f", "wall s"),
    Column("throughput", "tok/s", ".0f", "gen tok/s"),
    Column("ttft", "ms", ".1f", "TTFT ms"),
    Column("ttft_p99", "ms", ".1f", "TTFT p99"),
    Column("itl_p99", "ms", ".1f", "ITL p99 ms"),
    Column("latency", "ms", ".1f", "latency ms"),
)
_RATIOS = (
    Column("throughput", "x", ".2f"),
    Column("ttft", "x", ".2f", "TTFT"),
    Column("itl_p99", "x", ".2f", "ITL p99"),
    Column("latency", "x", ".2f"),
)


def add_arguments(parser: Parser) -> None:
    add_output_arguments(parser)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="directory or Hugging Face name (default: random weights, 11M parameters)",
    )
    parser.add_argument(
        "--scale",
        choices=SCALES,
        nargs="+",
        default=["seed"],
        help="longest prompts: the post's, 1k or 4k tokens, which take minutes (default: seed)",
    )
    add_choice(parser, "--scenario", [scenario.name for scenario in SEED_SCENARIOS], "workloads")
    add_choice(parser, "--mode", MODES, "engines to compare")
    help = "of each workload, all modes by turns"
    add_number(parser, "--repetitions", 5, help, type=positive_up_to(10_000))
    parser.add_argument(
        "--transport",
        choices=("NIXL", "SHARED_MEMORY"),
        default="NIXL",
        help="how KV moves between two engines (default: %(default)s)",
    )


@dataclass(slots=True)
class Outcome:
    """The measurements of one scenario by mode, and the number of tokens that differ between modes."""

    scale: str
    scenario: Scenario
    measured: Rounds = field(default_factory=Rounds)
    mismatches: int = 0
    compared: int = 0

    def compare(self, traces: Mapping[str, Sequence[Trace]]) -> None:
        """Compare the tokens of each mode with those of the first mode."""
        first, *others = traces.values()
        for other in others:
            self.mismatches += mismatched_tokens(first, other)
            self.compared += sum(len(trace.tokens) for trace in first)

    @property
    def name(self) -> str:
        return f"{self.scale} {self.scenario.name}"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of a disaggregated and a monolithic mode."""
        modes = self.measured.subjects
        disaggregated = [mode for mode in modes if mode in DISAGGREGATED]
        return [(mode, other) for other in modes if other not in DISAGGREGATED for mode in disaggregated]

    def ratio(self, mode: str, against: str, column: str) -> float:
        """Median over repetitions of the ratio."""
        return self.measured.ratio(column, mode, against)


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Measure and report. Exit status 1 if a token differs between two modes. Raises ConfigError."""
    parser = Parser(prog="python -m benchmarks.scenarios", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    args = parser.parse_args(arguments)

    def measure_all(say: Say) -> list[Outcome]:
        model = model_directory(args.model) if args.model else random_checkpoint(NANOGPT_DIRECTORY)
        return [outcome for name in args.scale for outcome in measure(SCALES[name], model, args, say)]

    outcomes = run_benchmark("scenarios", args, measure_all, report_of)
    return ExitCode.FAILED if any(outcome.mismatches for outcome in outcomes) else ExitCode.DONE


def two_cores() -> tuple[int, int]:
    """This process's first two cores. Raises ConfigError if it has only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("prefill and decode need a core each, and this process may use only one")
    return cores[0], cores[1]


def measure(scale: Scale, model: Path, args: argparse.Namespace, say: Say) -> list[Outcome]:
    """Measure the chosen scenarios. Scenarios with the same batch size share engines."""
    wanted = [scenario for scenario in scale.scenarios if scenario.name in args.scenario]
    outcomes: dict[str, Outcome] = {}
    by_batch = sorted(wanted, key=lambda scenario: -scenario.max_batch_size)
    for max_batch_size, group in groupby(by_batch, key=lambda scenario: scenario.max_batch_size):
        bench = Bench(model, scale, max_batch_size, args.transport, two_cores())
        with ExitStack() as stack:
            say(f"{scale.name}: starting engines for batches of {max_batch_size}")
            servers = start_servers(bench, args.mode, stack)
            for scenario in group:
                outcomes[scenario.name] = _repeat(
                    scale, scenario, servers, vocab_size(model), args.repetitions, say
                )
    return [outcomes[scenario.name] for scenario in wanted]


def _repeat(
    scale: Scale, scenario: Scenario, servers: dict[str, Server], vocabulary: int, repetitions: int, say: Say
) -> Outcome:
    """Measure all modes in each repetition, starting with another one each time."""
    outcome = Outcome(scale.name, scenario)
    say(f"{scale.name} {scenario.name}: warming up")
    warm_up = scenario.warm_up
    outcome.compare(
        {
            m: asyncio.run(drive(s.answer, warm_up, warm_up.prompts(-1, vocabulary)))
            for m, s in servers.items()
        }
    )
    for repetition in range(repetitions):
        prompts = scenario.prompts(repetition, vocabulary)
        traces: dict[str, list[Trace]] = {}
        for mode in rotated(list(servers), repetition):
            say(f"{scale.name} {scenario.name}: {mode}, repetition {repetition + 1} of {repetitions}")
            traces[mode] = asyncio.run(drive(servers[mode].answer, scenario, prompts))
            outcome.measured.note(mode, measures_of(traces[mode]))
        outcome.compare(traces)
    return outcome


def report_of(outcomes: Sequence[Outcome]) -> list[Section]:
    mismatches = sum(outcome.mismatches for outcome in outcomes)
    compared = sum(outcome.compared for outcome in outcomes)
    modes = [f"  {mode}: {MODES[mode].help}" for mode in outcomes[0].measured.subjects]
    by_scale = groupby(outcomes, key=lambda outcome: outcome.scale)
    return [
        Section(remarks=modes),
        *(_section_of(scale, list(group)) for scale, group in by_scale),
        Section(
            "Tokens that differ between modes",
            figures=[Figure("token mismatches", mismatches, "tokens", "== 0")],
            remarks=[f"{mismatches} of {compared} tokens differ between modes."],
        ),
    ]


def _section_of(scale: str, outcomes: Sequence[Outcome]) -> Section:
    chunk, uncut = SCALES[scale].chunk, SCALES[scale].whole_prompt
    title = f"Scale {scale}: {chunk} prompt tokens per step, or {uncut} for uncut prompts"
    rows = {(o.scenario.name, mode): _cells(o, mode) for o in outcomes for mode in o.measured.subjects}
    grids = [
        Grid(
            title,
            ("scenario", "mode"),
            (*_COLUMNS, Column("spread", form=".0%")),
            rows,
            f"{scale} {{0}} {{1}} {{column}}",
        )
    ]
    if any(outcome.pairs for outcome in outcomes):
        title = f"Scale {scale}: disaggregated / monolithic, in pairs"
        ratios = {row: cells for outcome in outcomes for row, cells in _ratio_rows(outcome).items()}
        grids.append(
            Grid(
                title,
                ("scenario", "against", "mode"),
                _RATIOS,
                ratios,
                f"{scale} {{0}} {{column}} {{2}}/{{1}}",
            )
        )
    best = [figure for outcome in outcomes for figure in _best(outcome)]
    return Section(
        "The better one of the disaggregated modes", grids, [o.scenario.sizes for o in outcomes], best
    )


def _cells(outcome: Outcome, mode: str) -> dict[str, float]:
    measured = outcome.measured
    return measured.medians(mode) | {"spread": spread(measured.values[mode]["wall"]) / 2}


def _ratio_rows(outcome: Outcome) -> dict[tuple[str, str, str], dict[str, float]]:
    """Ratios; the post's come first."""
    name, post = outcome.scenario.name, SEED_RATIOS[outcome.scenario.name]
    return {(name, "the post's", DISAGG): post} | {
        (name, against, mode): {column.name: outcome.ratio(mode, against, column.name) for column in _RATIOS}
        for mode, against in outcome.pairs
    }


def _best(outcome: Outcome) -> list[Figure]:
    """The better disaggregated mode / the post's baseline. Targets are the post's ratios, at every scale."""
    modes = [mode for mode, other in outcome.pairs if other == AS_IN_THE_POST]
    better = {"throughput": (max, ">="), "ttft": (min, "<=")} if modes else {}
    post = SEED_RATIOS[outcome.scenario.name]
    return [
        Figure(
            f"{outcome.name} {column} best disaggregated/{AS_IN_THE_POST}",
            choose(outcome.ratio(mode, AS_IN_THE_POST, column) for mode in modes),
            "x",
            f"{comparison} {post[column]:g}",
        )
        for column, (choose, comparison) in better.items()
    ]


if __name__ == "__main__":
    end_program(main)
