"""`trtllm-disagg rollout`: replaces the workers with those of a new revision, while both serve.

Pairs form within a revision, since each has its own namespace. Dynamo's frontend splits requests among revisions by
their number of first stages. `reconcile` picks the next worker that starts or stops.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.model_directory import servable_model
from trtllm_disagg.config.args import argument_parser_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.fleet import add_frontend
from trtllm_disagg.tools.flag_types import not_negative
from trtllm_disagg.tools.up.command_socket import send_to_up
from trtllm_disagg.tools.up.commands import Describe, Rollout
from trtllm_disagg.tools.up.plan import ProcessRole
from trtllm_disagg.tools.up.up_command import add_worker_args, engine_configs_in

#: Settings of the new workers.
_CHANGES = ("model", "engine_configs", "python", "worker_args", "in_place")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    add_frontend(parser)
    add = parser.add_argument
    name = argument_parser_of("worker_revision", "--to")
    add(
        "--to",
        required=True,
        type=name,
        metavar="NAME",
        help="new revision; the current one takes a rollout back",
    )
    add("--from", metavar="NAME", help="without --run-dir: old revision (default: workers without one)")
    add("--model", metavar="MODEL", help="with --run-dir: model of the new workers (default: unchanged)")
    add("--engine-configs", type=Path, metavar="DIR", help="with --run-dir: YAML files (default: unchanged)")
    add("--python", default="", metavar="FILE", help="with --run-dir: new Python (default: unchanged)")
    add(
        "--in-place",
        action="store_true",
        help="with --run-dir: one worker at a time, on the old worker's GPUs (default: new workers need free GPUs)",
    )
    add_worker_args(parser)
    add(
        "--drain-seconds",
        type=not_negative,
        default=600.0,
        metavar="SECONDS",
        help="max time for an old worker's requests (default: %(default)g)",
    )
    client.add_outcome(parser, 3600.0, "until the new revision answers the frontend")


def run(args: argparse.Namespace) -> ExitCode:
    """Returns 0 when the old revision has left. Raises DisaggError (1) when it fails, ConfigError (2) for bad flags."""
    given = [f"--{name.replace('_', '-')}" for name in _CHANGES if getattr(args, name)]
    if args.run_dir is None and given:
        raise ConfigError(
            f"{given[0]} needs --run-dir; without `up`, start the new workers yourself, with --worker-revision"
        )
    client.require_one_place(args)
    outcome = client.wish(args, _rollout(args))
    text = f"{outcome['revision']} serves with {len(outcome['serving'])} workers; "
    text += f"{len(outcome['left'])} old ones stopped, {outcome['requests_given_up']} requests given up"
    return client.print_outcome(args, outcome, text)


def _rollout(args: argparse.Namespace) -> Rollout:
    configs: Mapping[ProcessRole, Path] = {}
    if args.engine_configs:
        configs = engine_configs_in(args.engine_configs, send_to_up(args.run_dir, Describe())["strategy"])
    return Rollout(
        args.to,
        str(servable_model(args.model)) if args.model else "",
        {role: str(file) for role, file in configs.items()},
        args.python,
        tuple(args.worker_args),
        args.drain_seconds,
        args.in_place,
    )
