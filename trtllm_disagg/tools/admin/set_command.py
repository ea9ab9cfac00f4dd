"""`trtllm-disagg set`: changes the thresholds of running workers."""

from __future__ import annotations

import argparse
import json

from trtllm_disagg.admin.commands import Set
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.config.args import argument_parser_of
from trtllm_disagg.config.thresholds import NAMES
from trtllm_disagg.config.worker_config import SETTINGS, flag_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.fleet import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument(
        "--instance", metavar="ID", default="", help="worker id, as for `flip` (default: all workers)"
    )
    for name in NAMES:
        parser.add_argument(
            flag_of(name),
            type=argument_parser_of(name),
            metavar="N",
            help=f"{SETTINGS[name].help.partition(' (default: ')[0]} (default: unchanged)",
        )
    client.add_outcome(parser, 60.0, "until all workers have the values, including starting ones")


def run(args: argparse.Namespace) -> ExitCode:
    """Returns FAILED when a worker could not be changed. Raises ConfigError for a wrong setting."""
    values = {name: getattr(args, name) for name in NAMES if getattr(args, name) is not None}
    if not values:
        raise ConfigError(f"give at least one of {', '.join(map(flag_of, NAMES))}")
    outcome = client.wish(args, Set(values, args.instance))
    for each in outcome:
        if each["error"]:
            say(f"error: {each['worker']}: {each['error']}")
        elif not args.json:
            print(f"{each['worker']}: {', '.join(each['changed']) or 'unchanged'}")
    if args.json:
        print(json.dumps(outcome))
    return ExitCode.FAILED if any(each["error"] for each in outcome) else ExitCode.DONE
