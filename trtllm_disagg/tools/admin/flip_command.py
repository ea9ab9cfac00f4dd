"""`trtllm-disagg flip`: moves a running worker to the other role, without reloading its engine."""

from __future__ import annotations

import argparse

from trtllm_disagg.admin.commands import Flip
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.tools.admin import client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--instance",
        required=True,
        metavar="ID",
        help="worker id, hexadecimal, as `top` prints it; with --run-dir also the process name",
    )
    add("--to", required=True, choices=(Role.PREFILL.value, Role.DECODE.value), help="new role")
    add(
        "--force",
        action="store_true",
        help="flip even the last worker of a role, or an engine that is unfit for the new one",
    )
    client.add_arguments(parser)
    client.add_outcome(parser, 60.0, "until it serves in its new role")


def run(args: argparse.Namespace) -> ExitCode:
    """Raises ConfigError (2) for a wrong setting, DisaggError (1) for a refusal or a failure."""
    outcome = client.wish(args, Flip(args.to, args.force, args.instance))
    text = "{was} flipped to {role} in {seconds:.2f} s; its id is now {instance}"
    return client.print_outcome(args, outcome, text.format(**outcome))
