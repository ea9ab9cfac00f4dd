"""`trtllm-disagg bench engine`: the embedded engine compared with other engines, the hardware's limits and targets.

It has three parts. speed: prefill and decode of each engine, in its own process, in turns. overheads: what a step costs
beside the model, what the LLM API adds, memory. scaling: how the cost of a step and of a KV block grows.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from trtllm_disagg.config.settings import positive_up_to
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.exit_codes import ExitCode
from trtllm_disagg.tools.bench.engine.contestants import PEERS, install_peers
from trtllm_disagg.tools.bench.engine.measurement_plan import DTYPES, QUICK, Case, MeasurementPlan
from trtllm_disagg.tools.bench.engine.peer_checkpoints import DEFAULT_DIRECTORY
from trtllm_disagg.tools.bench.figures import Section
from trtllm_disagg.tools.bench.models import SIZES
from trtllm_disagg.tools.bench.report import TOO_SHORT, Say, add_choice, add_output_arguments, run_benchmark

PARTS = ("speed", "overheads", "scaling")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = MeasurementPlan()
    add_output_arguments(parser)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and two rounds, to see that all parts run"
    )
    add_choice(parser, "--part", PARTS, "of the measurement")
    sizes = " ".join(default.sizes)
    parser.add_argument("--size", choices=SIZES, nargs="+", help=f"parameters (default: {sizes})")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", help="of weights (default: both)")
    parser.add_argument(
        "--threads", type=positive_up_to(1024), nargs="+", metavar="N", help="of the engine (default: 1 2)"
    )
    parser.add_argument(
        "--batch",
        type=positive_up_to(4096),
        nargs="+",
        metavar="N",
        help="sequences that are decoded at once (default: 1 8 32)",
    )
    parser.add_argument(
        "--rounds",
        type=positive_up_to(10_000),
        metavar="N",
        help=f"repetitions, all engines by turns (default: {default.rounds})",
    )
    add_choice(parser, "--peer", PEERS, "engines beside the embedded one", nargs="*")
    parser.add_argument(
        "--install-peers",
        action="store_true",
        help="first make the virtual environments that some peers need, with pip; 3 GB",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=DEFAULT_DIRECTORY,
        metavar="DIR",
        help="where checkpoints and environments are kept; 7 GB for all checkpoints (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Exit status 0. Raises EngineError when the embedded engine fails; peers may be absent, or fail."""
    plan = (QUICK if args.quick else MeasurementPlan()).with_options(
        sizes=args.size, dtypes=args.dtype, threads=args.threads, batches=args.batch, rounds=args.rounds
    )

    try:
        args.cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = f"a directory that can be made ({error.strerror})"
        raise ConfigError.bad_value("--cache-dir", str(args.cache_dir), allowed) from None

    def measure(say: Say) -> list[Section]:
        if args.install_peers:
            install_peers(args.peer, args.cache_dir, say)
        sections = _measure(plan, args, say)
        if args.quick:
            return [replace(section, not_judged_because=TOO_SHORT) for section in sections]
        return sections

    run_benchmark("engine", args, measure, lambda sections: sections)
    return ExitCode.DONE


def _measure(plan: MeasurementPlan, args: argparse.Namespace, say: Say) -> list[Section]:
    """The part `scaling` uses the smallest model: its own step hides the other costs least."""
    # The command's --help needs no torch.
    from trtllm_disagg.tools.bench.engine import costs, speed

    cases = [Case(plan, SIZES[size], dtype, args.cache_dir) for size in plan.sizes for dtype in plan.dtypes]
    lengths = f"Prompts of {plan.prompt_tokens} tokens, decode at context {plan.context}"
    sections = [Section(remarks=[f"{lengths}, {plan.rounds} rounds; medians, ratios in pairs."])]
    if "speed" in args.part:
        sections += [
            speed.section_of(speed.measure_speeds(replace(case, threads=threads), args.peer, say))
            for case in cases
            for threads in plan.threads
        ]
    if "overheads" in args.part:
        sections += [costs.overheads_section(costs.measure_overheads(case, say)) for case in cases]
        sections.append(costs.added_ttft_section(costs.measure_added_ttft(plan, args.cache_dir, say)))
    if "scaling" in args.part:
        smallest = replace(cases[0], dtype=cases[-1].dtype)
        sections.append(costs.scaling_section(smallest.model, costs.measure_scaling(smallest, say)))
    return sections
