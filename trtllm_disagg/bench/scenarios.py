"""`trtllm-disagg bench scenarios`: monolithic and disaggregated serving of the same requests on the same two cores.

Engines only: no frontend, no Dynamo. Sampling at temperature 1 with seeds, so the two must agree token by token.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtllm_disagg.bench.driving import Measures, Trace, drive, mismatched_tokens
from trtllm_disagg.bench.figures import Figure, Sample, at_least, at_most, exactly, paired_ratio
from trtllm_disagg.bench.machine import two_cores
from trtllm_disagg.bench.models import NANOGPT_DIRECTORY, random_checkpoint, vocab_size
from trtllm_disagg.bench.plot import Bars
from trtllm_disagg.bench.report import Say, add_output_arguments, run_benchmark, table
from trtllm_disagg.bench.servers import DISAGGREGATED, MODES, Bench, Server, start_servers
from trtllm_disagg.bench.workloads import SCALES, SEED_RATIOS, SEED_SCENARIOS, Scale, Scenario
from trtllm_disagg.kv_transfer.choose import ON_ONE_HOST
from trtllm_disagg.model_directory import model_directory

#: Header, attribute of Measures, unit, format.
_COLUMNS = (
    ("wall s", "wall", "s", ".3f"),
    ("gen tok/s", "throughput", "tok/s", ".0f"),
    ("TTFT ms", "ttft", "ms", ".1f"),
    ("TTFT p99", "ttft_p99", "ms", ".1f"),
    ("ITL p99 ms", "itl_p99", "ms", ".1f"),
    ("latency ms", "latency", "ms", ".1f"),
)
_RATIOS = {"throughput": "throughput", "TTFT": "ttft", "ITL p99": "itl_p99", "latency": "latency"}
#: The post's strongest scenario: its ratios are to be beaten, at any size.
_TARGET = "long_prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        help="prompts as in the post, or up to 1k or 4k tokens, which takes minutes (default: %(default)s)",
    )
    names = [scenario.name for scenario in SEED_SCENARIOS]
    parser.add_argument("--scenario", choices=names, nargs="+", default=names, help="(default: all)")
    parser.add_argument("--mode", choices=MODES, nargs="+", default=list(MODES), help="(default: all)")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--transport", choices=ON_ONE_HOST, default="NIXL", help="(default: %(default)s)")


@dataclass(slots=True)
class Outcome:
    """One scenario; measures at the same place are of the same repetition."""

    scale: str
    scenario: Scenario
    measures: dict[str, list[Measures]] = field(default_factory=dict)
    mismatches: int = 0
    compared: int = 0

    def sample(self, mode: str, column: str) -> Sample:
        return Sample.of(getattr(measures, column) for measures in self.measures[mode])

    def ratio(self, mode: str, against: str, column: str) -> float:
        """Median of the repetitions' own ratios."""
        return paired_ratio(self.sample(mode, column).values, self.sample(against, column).values).median

    def compare(self, traces: Mapping[str, Sequence[Trace]]) -> None:
        """Every mode's tokens with those of one of them."""
        first, *others = traces.values()
        for other in others:
            self.mismatches += mismatched_tokens(first, other)
            self.compared += sum(len(trace.tokens) for trace in first)

    @property
    def name(self) -> str:
        return f"{self.scale} {self.scenario.name}"

    @property
    def monolithic(self) -> list[str]:
        return [mode for mode in self.measures if mode not in DISAGGREGATED]

    @property
    def disaggregated(self) -> list[str]:
        return [mode for mode in self.measures if mode in DISAGGREGATED]


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when a token differs between two modes, else 0."""

    def measure_all(say: Say) -> list[Outcome]:
        model = model_directory(args.model) if args.model else random_checkpoint(NANOGPT_DIRECTORY)
        return [outcome for name in args.scale for outcome in measure(SCALES[name], model, args, say)]

    outcomes = run_benchmark("scenarios", args, measure_all, figures_of, print_tables, panels_of)
    return 1 if any(outcome.mismatches for outcome in outcomes) else 0


def measure(scale: Scale, model: Path, args: argparse.Namespace, say: Say) -> list[Outcome]:
    """Engines are started once for all scenarios of one batch size."""
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
    scale: Scale,
    scenario: Scenario,
    servers: dict[str, Server],
    vocabulary: int,
    repetitions: int,
    say: Say,
) -> Outcome:
    """Modes take turns, and whose turn is first changes as well."""
    outcome = Outcome(scale.name, scenario, {mode: [] for mode in servers})
    say(f"{scale.name} {scenario.name}: warming up")
    warm_up = scenario.warm_up
    outcome.compare(
        {m: asyncio.run(drive(s, warm_up, warm_up.prompts(-1, vocabulary))) for m, s in servers.items()}
    )
    order = list(servers)
    for repetition in range(repetitions):
        prompts = scenario.prompts(repetition, vocabulary)
        traces: dict[str, list[Trace]] = {}
        for mode in order:
            say(f"{scale.name} {scenario.name}: {mode}, repetition {repetition + 1} of {repetitions}")
            traces[mode] = asyncio.run(drive(servers[mode], scenario, prompts))
            outcome.measures[mode].append(Measures.of(traces[mode]))
        order = [*order[1:], order[0]]
        outcome.compare(traces)
    return outcome


def figures_of(outcomes: Sequence[Outcome]) -> list[Figure]:
    figures = [figure for outcome in outcomes for figure in _figures_of_one(outcome)]
    mismatches = sum(outcome.mismatches for outcome in outcomes)
    return [*figures, exactly("token mismatches", mismatches, "tokens", 0)]


def _figures_of_one(outcome: Outcome) -> list[Figure]:
    """The targets are for the better one of the disaggregated modes, against each monolithic one."""
    name = outcome.name
    figures = [
        Figure(f"{name} {mode} {column}", outcome.sample(mode, column).median, unit)
        for mode in outcome.measures
        for _, column, unit, _ in _COLUMNS
    ]
    for against in outcome.monolithic if outcome.disaggregated else ():
        figures += [
            Figure(f"{name} {column} {mode}/{against}", outcome.ratio(mode, against, column), "x")
            for mode in outcome.disaggregated
            for column in _RATIOS.values()
        ]
        if outcome.scenario.name == _TARGET:
            figures += _best_figures(outcome, against)
    return figures


def _best_figures(outcome: Outcome, against: str) -> list[Figure]:
    def ratios(column: str) -> list[float]:
        return [outcome.ratio(mode, against, column) for mode in outcome.disaggregated]

    seed, pair = SEED_RATIOS[outcome.scenario.name], f"best disaggregated/{against}"
    throughput, ttft = max(ratios("throughput")), min(ratios("ttft"))
    return [
        at_least(f"{outcome.name} throughput {pair}", throughput, "x", seed.throughput),
        at_most(f"{outcome.name} ttft {pair}", ttft, "x", seed.ttft),
    ]


def print_tables(console: Console, outcomes: Sequence[Outcome]) -> None:
    for mode in outcomes[0].measures:
        console.print(f"  {mode}: {MODES[mode].help}")
    for scale, group in groupby(outcomes, key=lambda outcome: outcome.scale):
        of_scale = list(group)
        console.print(_results(scale, of_scale))
        if of_scale[0].disaggregated and of_scale[0].monolithic:
            console.print(_ratios(scale, of_scale))
    mismatches = sum(outcome.mismatches for outcome in outcomes)
    compared = sum(outcome.compared for outcome in outcomes)
    console.print(f"{mismatches} of {compared} tokens differ between modes.")


def _results(scale: str, outcomes: Sequence[Outcome]) -> Table:
    chunk, whole = SCALES[scale].chunk, SCALES[scale].whole_prompt
    title = f"Scale {scale}: chunks of {chunk} prompt tokens a step, or {whole} where no prompt is cut"
    shown = table(title, ("scenario", "mode", *(f">{header}" for header, *_ in _COLUMNS), ">spread"))
    for outcome in outcomes:
        for label, mode in zip_longest(outcome.scenario.labels, outcome.measures, fillvalue=""):
            shown.add_row(label, mode, *(_cells(outcome, mode) if mode else ()))
        shown.add_section()
    return shown


def _cells(outcome: Outcome, mode: str) -> list[str]:
    values = [format(outcome.sample(mode, column).median, form) for _, column, _, form in _COLUMNS]
    return [*values, f"±{outcome.sample(mode, 'wall').spread / 2:.0%}"]


def _ratios(scale: str, outcomes: Sequence[Outcome]) -> Table:
    headers = ("scenario", "against", "mode", *(f">{header}" for header in _RATIOS))
    shown = table(f"Scale {scale}: disaggregated / monolithic, in pairs", headers)
    for outcome in outcomes:
        seed = SEED_RATIOS[outcome.scenario.name]
        post = (f"{seed.throughput:.2f}x", f"{seed.ttft:.2f}x", "", f"{seed.latency:.2f}x")
        shown.add_row(outcome.scenario.name, "the post's", "", *post)
        for against in outcome.monolithic:
            for number, mode in enumerate(outcome.disaggregated):
                cells = [f"{outcome.ratio(mode, against, column):.2f}x" for column in _RATIOS.values()]
                shown.add_row("", "" if number else against, mode, *cells)
        shown.add_section()
    return shown


def panels_of(outcomes: Sequence[Outcome]) -> list[Bars]:
    titles = {"throughput": "gen tok/s", "ttft": "TTFT ms", "itl_p99": "ITL p99 ms"}
    return [
        Bars(
            f"{scale}: {title}",
            {
                mode: {o.scenario.name: o.sample(mode, column).median for o in outcomes if o.scale == scale}
                for mode in outcomes[0].measures
            },
        )
        for scale in dict.fromkeys(outcome.scale for outcome in outcomes)
        for column, title in titles.items()
    ]
