"""`trtllm-disagg scale`: more or fewer workers of a running `up`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trtllm_disagg.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, metavar="DIR", help="run directory of a running `up`")
    for role in ("prefill", "decode", "agg"):
        add(f"--{role}", type=int, metavar="N", help=f"how many {role} workers (default: as they are)")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 when so many run, 1 when a new one did not come up, 2 when a setting is wrong."""
    # `--help` needs none of it.
    from trtllm_disagg.commands import Scale
    from trtllm_disagg.deployment.command_socket import send_to_up

    given = {"prefill": args.prefill, "decode": args.decode, "agg": args.agg}
    workers = {role: count for role, count in given.items() if count is not None}
    if not workers:
        raise ConfigError("say how many: --prefill N, --decode N or --agg N")
    print(send_to_up(args.run_dir, Scale(workers), lambda text: print(text, file=sys.stderr, flush=True)))
    return 0
