"""`trtllm-disagg bench engine`: the embedded engine beside its peers, the hardware's roofs and its own targets.

Three parts. speed: prefill and decode, every engine in a process of its own, in turns. overheads: what a step costs
beside the model, what the LLM API adds, memory. scaling: how a step and a KV block's cost grow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_disagg.bench.engine.checkpoints import DEFAULT_DIRECTORY
from trtllm_disagg.bench.engine.contestants import PEERS
from trtllm_disagg.bench.engine.plan import DTYPES, QUICK, SIZES, Plan
from trtllm_disagg.bench.figures import to_json
from trtllm_disagg.bench.machine import load
from trtllm_disagg.bench.progress import Progress

PARTS = ("speed", "overheads", "scaling")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Plan()
    parser.add_argument("--json", action="store_true", help="print figures instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a PNG; needs matplotlib")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: does it all run?")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="(default: all)")
    parser.add_argument(
        "--size", choices=SIZES, nargs="+", help=f"parameters (default: {_listed(default.sizes)})"
    )
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", help="(default: both)")
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="(default: 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", metavar="N", help="(default: 1 8 32)")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"(default: {default.rounds})")
    parser.add_argument("--peer", choices=PEERS, nargs="*", default=list(PEERS), help="(default: all)")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=DEFAULT_DIRECTORY,
        metavar="DIR",
        help="where checkpoints are kept; 7 GB for all (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Exit status 0. Raises EngineError when the embedded engine fails; peers may be absent, or fail."""
    # Every contestant's process imports this package, and none needs these.
    from trtllm_disagg.bench.engine.report import print_report
    from trtllm_disagg.bench.engine.results import measure
    from trtllm_disagg.bench.plot import require_matplotlib

    if args.plot is not None:
        require_matplotlib()
    plan = (QUICK if args.quick else Plan()).with_options(
        sizes=args.size, dtypes=args.dtype, threads=args.threads, batches=args.batch, rounds=args.rounds
    )
    before = load()
    with Progress("engine") as progress:
        results = measure(plan, args.part, args.peer, args.cache_dir, progress.say)
    results.is_judged = not args.quick
    if args.json:
        print(to_json(results.figures))
    else:
        print_report(results, plan, before)
    if args.plot is not None:
        from trtllm_disagg.bench.engine.charts import draw

        draw(results, args.plot)
    return 0


def _listed(names: tuple[str, ...]) -> str:
    return " ".join(names)
