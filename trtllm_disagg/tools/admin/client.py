"""The flags of `switch`, `set`, `flip`, `scale` and `rollout`, and their recipient: the `up` of a run directory, or
the workers themselves (`fleet.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.steadily import without_silence
from trtllm_disagg.config.worker_config import SETTINGS, flag_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.admin import fleet
from trtllm_disagg.tools.admin.fleet import KEY_FLAG, KEY_VARIABLE, say
from trtllm_disagg.tools.flag_types import not_negative
from trtllm_disagg.tools.up.command_socket import send_to_up
from trtllm_disagg.tools.up.wishes import WishCommand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of `up`")
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help=f"without --run-dir: Dynamo namespace [{', '.join(SETTINGS['namespace'].variables)}]",
    )
    parser.add_argument(
        KEY_FLAG,
        type=Path,
        metavar="FILE",
        help=f"without --run-dir: the workers' {flag_of('admin_key_file')} [{KEY_VARIABLE}] "
        "(default: the launch scripts' key)",
    )


def require_one_place(args: argparse.Namespace) -> None:
    given = [f"no --{name}" for name in ("namespace", "frontend", "from") if getattr(args, name, None)]
    if args.run_dir is not None and given:
        raise ConfigError(f"--run-dir names the whole deployment; give {' and '.join(given)} with it")


def add_outcome(parser: argparse.ArgumentParser, default: float | None, until: str) -> None:
    """How long to wait for the outcome, and how to print it. `default`: seconds; with a run directory, `up` continues
    after them.
    """
    text = f"max time {until} (default: {'no limit' if default is None else '%(default)g'})"
    parser.add_argument("--timeout", type=not_negative, default=default, metavar="SECONDS", help=text)
    parser.add_argument(
        "--undo",
        action="store_true",
        help="with --run-dir: after Ctrl-C or --timeout, take back what is not done (default: `up` continues)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def print_outcome(args: argparse.Namespace, outcome: Any, text: str) -> ExitCode:
    print(json.dumps(outcome) if args.json else text)
    return ExitCode.DONE


def wish(args: argparse.Namespace, command: WishCommand) -> Any:
    """Sends the command, waits until the workers are as it says, and returns its outcome."""
    require_one_place(args)
    if args.run_dir is None:
        return fleet.send(args, command)
    with without_silence(say, "waiting for `up`") as report:
        return send_to_up(args.run_dir, command, report, deadline=args.timeout, undo=args.undo)
