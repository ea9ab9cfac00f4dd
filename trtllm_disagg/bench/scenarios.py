"""`trtllm-disagg bench scenarios`: monolithic and disaggregated serving of the same requests on the same two cores.

Engines only: no frontend, no Dynamo. Sampling at temperature 1 with seeds, so the two must agree token by token.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from trtllm_disagg.bench.driving import Measures, Trace, drive, mismatched_tokens
from trtllm_disagg.bench.figures import Sample, paired_ratio, to_json
from trtllm_disagg.bench.machine import load, two_cores
from trtllm_disagg.bench.model import DEFAULT_DIRECTORY, random_checkpoint, vocab_size
from trtllm_disagg.bench.plot import require_matplotlib
from trtllm_disagg.bench.progress import Progress
from trtllm_disagg.bench.servers import DISAGGREGATED, MODES, Bench, Server, start_servers
from trtllm_disagg.bench.workloads import SCALES, SEED_SCENARIOS, Ratios, Scale, Scenario
from trtllm_disagg.kv_transfer.transports import ON_ONE_HOST
from trtllm_disagg.model_directory import model_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print figures instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a PNG; needs matplotlib")
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
        return Sample(tuple(getattr(measures, column) for measures in self.measures[mode]))

    def ratio(self, mode: str, against: str, column: str) -> float:
        """Median of the repetitions' own ratios."""
        return paired_ratio(self.sample(mode, column).values, self.sample(against, column).values).median

    def ratios(self, mode: str, against: str) -> Ratios:
        columns = ("throughput", "ttft", "latency")
        return Ratios(*(self.ratio(mode, against, column) for column in columns))

    def compare(self, traces: Mapping[str, Sequence[Trace]]) -> None:
        """Every mode's tokens with those of one of them."""
        first, *others = traces.values()
        for other in others:
            self.mismatches += mismatched_tokens(first, other)
            self.compared += sum(len(trace.tokens) for trace in first)

    @property
    def monolithic(self) -> list[str]:
        return [mode for mode in self.measures if mode not in DISAGGREGATED]

    @property
    def disaggregated(self) -> list[str]:
        return [mode for mode in self.measures if mode in DISAGGREGATED]


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when a token differs between two modes, else 0."""
    from trtllm_disagg.bench.scenario_report import figures_of, plot, print_report

    if args.plot is not None:
        require_matplotlib()
    before = load()
    with Progress("scenarios") as progress:
        model = model_directory(args.model) if args.model else random_checkpoint(DEFAULT_DIRECTORY)
        outcomes = [
            outcome for name in args.scale for outcome in measure(SCALES[name], model, args, progress.say)
        ]
    if args.json:
        print(to_json(figures_of(outcomes)))
    else:
        print_report(outcomes, before)
    if args.plot is not None:
        plot(outcomes, args.plot)
    return 1 if any(outcome.mismatches for outcome in outcomes) else 0


def measure(scale: Scale, model: Path, args: argparse.Namespace, say: Callable[[str], None]) -> list[Outcome]:
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
    say: Callable[[str], None],
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
