"""`trtllm-disagg scale`: changes the number of workers of a running `up`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trtllm_disagg.admin.commands import Scale
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.admin import client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, metavar="DIR", help="run directory of a running `up`")
    for role in ("prefill", "decode", "agg"):
        add(f"--{role}", type=int, metavar="N", help=f"number of {role} workers (default: unchanged)")
    client.add_timeout(parser, None, "until they serve")
    client.add_json(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Raises ConfigError for a wrong setting, DisaggError when a new worker does not become ready."""
    given = {"prefill": args.prefill, "decode": args.decode, "agg": args.agg}
    workers = {role: count for role, count in given.items() if count is not None}
    if not workers:
        raise ConfigError("say how many: --prefill N, --decode N or --agg N")
    running = client.wish(args, Scale(workers))
    text = "scaled: " + ", ".join(f"{count} {role}" for role, count in running.items())
    print(json.dumps(running) if args.json else text)
    return ExitCode.DONE
