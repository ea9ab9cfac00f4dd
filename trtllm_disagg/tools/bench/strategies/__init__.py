"""`trtllm-disagg bench strategies`: which order, with how many workers, for a model, GPUs and traffic."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.config.settings import positive_up_to
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.exit_codes import ExitCode
from trtllm_disagg.processes.steadily import without_silence
from trtllm_disagg.tools.up.up_command import add_worker_args

if TYPE_CHECKING:
    from trtllm_disagg.tools.bench.strategies.records import RunDirectory

_REQUESTS, _QUICK_REQUESTS = 200, 14
#: The value of `--requests` that fills the GPUs at each rate, by the tables.
_AUTO = "auto"
_REPETITIONS, _QUICK_REPETITIONS = 2, 1
#: The flags that each of these three uses; others would have no effect.
_OF_FORESEE = (
    *("foresee", "json", "model", "slo", "engine", "engine_configs", "override_engine_args"),
    *("url", "workers", "workloads", "trace", "quick"),
)
_OF_ADVISE = ("advise", "out", "slo")
_OF_URL = (
    *("url", "out", "model", "slo", "workloads", "trace", "rates"),
    *("requests", "repetitions", "time_scale", "quick", "aiperf", "gpus_per_worker"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="the run directory; a run that was cut off goes on")
    add(
        "--foresee",
        action="store_true",
        help="start and measure nothing: by a simulation on the tables, which layout should be best, and under which "
        "limits; needs no --out",
    )
    add("--json", action="store_true", help="of --foresee: print JSON instead of tables")
    add("--model", type=Path, metavar="DIR", help="directory with a tokenizer and a config.json")
    add("--slo", metavar="LIMITS", help="milliseconds that an answer may take (default: ttft=500,tpot=30)")
    add(
        "--advise",
        action="store_true",
        help="measure nothing: the report of what is in --out, and its advice",
    )
    add("--engine", default="modelled", help="which module offers the LLM API (default: %(default)s)")
    add(
        "--engine-configs",
        type=Path,
        default=Path("engine_configs/modelled"),
        metavar="DIR",
        help="agg.yaml, prefill.yaml and decode.yaml, of as many GPUs each (default: %(default)s)",
    )
    add(
        "--override-engine-args",
        default="",
        metavar="JSON",
        help='over the YAML files of all roles, as \'{"modelled": {"system": "h200_sxm"}}\'',
    )
    add(
        "--url",
        action="append",
        default=[],
        metavar="'ARM=URL'",
        help="a deployment that serves already, and which arm it is; once for each",
    )
    add(
        "--gpus-per-worker",
        type=positive_up_to(1024),
        metavar="N",
        help="GPUs of each worker behind a --url, for tok/s/GPU (default: 1)",
    )
    add("--workers", metavar="N,...", help="of each arm, all roles together (default: 2,4)")
    add(
        "--arms",
        metavar="PATTERN,...",
        help="as '* agg,1P*decode_first' (default: all strategies, no deciders)",
    )
    add("--workloads", metavar="NAME,...", help="chat, rag, reasoning, agentic, bursts, trace (default: all)")
    add("--trace", type=Path, metavar="FILE", help="the workload trace: lines of a Mooncake trace")
    add("--rates", metavar="R,...", help="requests a modelled second (default: by the tables, to saturation)")
    add(
        "--requests",
        type=_count_or_auto,
        metavar="N",
        help=f"of a point; auto: as many as fill modelled GPUs at its rate (default: {_REQUESTS}; "
        f"with --quick: {_QUICK_REQUESTS})",
    )
    add(
        "--repetitions",
        type=positive_up_to(10_000),
        metavar="N",
        help=f"of a point (default: {_REPETITIONS}; with --quick: {_QUICK_REPETITIONS})",
    )
    add(
        "--band",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="all step times of prefill, and of decode, so much longer and shorter; 0: only as the tables say "
        "(default: %(default)s)",
    )
    add(
        "--time-scale",
        type=float,
        metavar="K",
        help="how many times slower the modelled clock runs (default: what each workload needs)",
    )
    add(
        "--quick",
        action="store_true",
        help="2 workers, agg and one pair in each order, one workload, three rates, and one or two on each side of the "
        "band: minutes instead of hours",
    )
    add(
        "--aiperf",
        type=Path,
        metavar="FILE",
        help="AIPerf's command (default: of this environment, or in PATH)",
    )
    add_worker_args(parser)


def settle(args: argparse.Namespace) -> None:
    """Completes the parsed flags: defaults that depend on --quick, and what --requests means."""
    args.repetitions = args.repetitions or (_QUICK_REPETITIONS if args.quick else _REPETITIONS)
    args.requests = args.requests or (_QUICK_REQUESTS if args.quick else _REQUESTS)
    args.fills_gpus = args.requests == _AUTO
    args.fewest_requests = _QUICK_REQUESTS if args.fills_gpus else args.requests


def _count_or_auto(text: str) -> int | str:
    return _AUTO if text == _AUTO else positive_up_to(100_000)(text)


def run(args: argparse.Namespace) -> ExitCode:
    # The package is imported for `--help` too, which needs no engine.
    from trtllm_disagg.console import Console
    from trtllm_disagg.tools.bench.figures import require_packages
    from trtllm_disagg.tools.bench.strategies.planning import slo_of
    from trtllm_disagg.tools.bench.strategies.records import RunDirectory
    from trtllm_disagg.tools.bench.strategies.run_report import write_report

    if args.foresee:
        _refuse_flags_beside("--foresee", args, _OF_FORESEE)
        return _foresee(args)
    if args.json:
        raise ConfigError("--json needs --foresee beside it; of a run it is report.json in --out")
    if args.out is None:
        raise ConfigError("--out is missing; give a directory for the run (--foresee alone needs none)")
    if args.advise:
        _refuse_flags_beside("--advise", args, _OF_ADVISE)
    elif args.url:
        _refuse_flags_beside("--url", args, _OF_URL)
    elif args.gpus_per_worker:
        raise ConfigError(
            "--gpus-per-worker needs --url beside it; the engine configs say how many GPUs their workers have"
        )
    slo = slo_of(args)
    # Checked first: a run that has measured for an hour should not fail then.
    require_packages("bench strategies", "matplotlib", "jinja2")
    directory = RunDirectory(args.out)
    if not args.advise and (code := _measure(args, directory)):
        return code
    with without_silence(_say, "writing the report"):
        report = write_report(directory, slo)
    Console().paragraph(report.advice())
    print(f"\n{directory.path / 'report.html'}")
    return ExitCode.DONE


def _refuse_flags_beside(mode: str, args: argparse.Namespace, used: tuple[str, ...]) -> None:
    """Raises ConfigError for a flag that has no effect beside `mode`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name not in used and (value := getattr(args, name)) != default:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError.bad_value(flag, str(value), f"no {flag} beside {mode}, where it has no effect")


def _foresee(args: argparse.Namespace) -> ExitCode:
    import msgspec

    from trtllm_disagg.tools.bench.figures import Section
    from trtllm_disagg.tools.bench.report import print_tables, wide_console
    from trtllm_disagg.tools.bench.strategies.layout_comparison import compare_layouts, grids
    from trtllm_disagg.tools.bench.strategies.starting import check

    settle(args)
    check(args)
    with without_silence(_say, "simulating"):
        compared = compare_layouts(args)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(compared)).decode())
    else:
        print_tables(wide_console(), [Section(grids=[grid for each in compared for grid in grids(each)])])
    return ExitCode.DONE


def _measure(args: argparse.Namespace, directory: RunDirectory) -> ExitCode:
    from trtllm_disagg.tools.bench.strategies.aiperf import AIPerf
    from trtllm_disagg.tools.bench.strategies.starting import check, measure_all

    settle(args)
    check(args)
    aiperf = AIPerf.find(args.aiperf)
    with directory.claimed():
        return asyncio.run(measure_all(args, aiperf, directory, _say))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
