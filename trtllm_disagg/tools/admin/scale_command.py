"""`trtllm-disagg scale`: changes the number of workers of a running `up`."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.up.commands import Scale


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, metavar="DIR", help="run directory of `up`")
    for role in ("prefill", "decode", "agg"):
        add(f"--{role}", type=int, metavar="N", help=f"number of {role} workers (default: unchanged)")
    client.add_outcome(parser, None, "until the new workers serve")


def run(args: argparse.Namespace) -> ExitCode:
    """Raises ConfigError for a wrong setting, DisaggError when a new worker fails to start."""
    given = {"prefill": args.prefill, "decode": args.decode, "agg": args.agg}
    workers = {role: count for role, count in given.items() if count is not None}
    if not workers:
        raise ConfigError("give a number of workers: --prefill N, --decode N or --agg N")
    running = client.wish(args, Scale(workers))
    text = "scaled: " + ", ".join(f"{count} {role}" for role, count in running.items())
    return client.print_outcome(args, running, text)
