"""`trtllm-disagg bench strategies`: layouts x workloads x rates, on modelled engines or behind URLs, by AIPerf.

The directory of a run has results.csv, results.json, results.html, the logs of the deployments, and AIPerf's own files
for each layout and workload. What is measured stays: the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.config.settings import positive_up_to
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.plan import add_layout_arguments
from trtllm_disagg.tools.up.up_command import add_worker_args

if TYPE_CHECKING:
    from trtllm_disagg.cli import Parser

_PLAIN_RUN = "measure with the plain run; results.csv and results.html have every number"
_REPLACED = {
    "--foresee": "use `trtllm-disagg plan`",
    "--json": "results.json in --out has the numbers; `trtllm-disagg plan --json` has the simulation's",
    "--advise": _PLAIN_RUN,
    "--arms": "use --layouts, with the same patterns",
    "--repetitions": "give another --out for a second run",
    "--band": f'{_PLAIN_RUN}; `--override-engine-args \'{{"modelled": {{"decode_factor": 1.5}}}}\'` scales step times',
}


def add_arguments(parser: Parser) -> None:
    add_layout_arguments(parser)
    add = parser.add_argument
    text = "the run's directory; a run that was cut off goes on"
    add("--out", type=Path, required=True, metavar="DIR", help=text)
    text = "as '* agg,1P*decode_first' (default: all orders, no deciders)"
    add("--layouts", metavar="PATTERN,...", help=text)
    number, text = positive_up_to(100_000), "at each rate (default: 100)"
    add("--requests", type=number, default=100, metavar="N", help=text)
    add("--quick", action="store_true", help="2 workers, one workload (rag), 20 requests at each rate")
    add("--engine", default="modelled", help="which module offers the LLM API (default: %(default)s)")
    text = "how many times slower the modelled clock runs: this machine's own time counts less (default: 4)"
    add("--time-scale", type=float, default=4.0, metavar="K", help=text)
    text = "a deployment that serves already, and its layout"
    add("--url", action="append", default=[], metavar="'LAYOUT=URL'", help=text)
    text = "behind a --url, for tok/s/GPU (default: 1)"
    add("--gpus-per-worker", type=positive_up_to(1024), metavar="N", help=text)
    text = "AIPerf's command (default: of this environment, or in PATH)"
    add("--aiperf", type=Path, metavar="FILE", help=text)
    add_worker_args(parser)
    parser.replaced = _REPLACED


def run(args: argparse.Namespace) -> ExitCode:
    # Imported here: `--help` needs no engine.
    from trtllm_disagg.tools.bench.aiperf import AIPerf
    from trtllm_disagg.tools.bench.results import write_results
    from trtllm_disagg.tools.bench.sweeps import Run, plan_of, say
    from trtllm_disagg.tools.up.lifecycle import Interrupts

    measuring = Run(args.out, AIPerf.find(args.aiperf), plan_of(args))

    async def measured() -> tuple[bool, ExitCode]:
        with Interrupts().listening() as interrupts:
            return await interrupts.allow(measuring.measure()), interrupts.exit_code

    try:
        is_complete, code = asyncio.run(measured())
    finally:
        if rows := list(measuring.rows()):
            print(write_results(args.out, measuring.plan.subject, measuring.plan.slo, rows))
    if is_complete:
        return ExitCode.DONE
    say("interrupted; what is measured is kept, and the same command goes on with what is missing")
    return code
