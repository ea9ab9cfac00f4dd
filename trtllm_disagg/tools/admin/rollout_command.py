"""`trtllm-disagg rollout`: the workers of a new revision take the place of the old ones, while both serve.

Each revision has a namespace of its own, so pairs form within it, and Dynamo's frontend sends each request to one of
them, by the number of their first stages. `reconcile` says which worker starts or leaves next.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_disagg.admin.commands import Describe, Rollout
from trtllm_disagg.config.args import argument_parser_of
from trtllm_disagg.config.settings import not_negative
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.model_directory import servable_model
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.client import Workers, all_workers
from trtllm_disagg.tools.admin.fleet import Fleet, add_frontend, knows_by, require_key
from trtllm_disagg.tools.up.command_socket import send_to_up
from trtllm_disagg.tools.up.look import FirstStages, WhyNot
from trtllm_disagg.tools.up.reconcile import Seen, Wanted
from trtllm_disagg.tools.up.up_command import add_worker_args, engine_configs_in

#: What `up` starts the new workers with.
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
        help="the new revision; the current one takes one back",
    )
    add("--from", metavar="NAME", help="without --run-dir: the old one (default: workers without a revision)")
    add("--model", metavar="MODEL", help="with --run-dir: of the new workers (default of these: unchanged)")
    add("--engine-configs", type=Path, metavar="DIR", help="with --run-dir: as of `up`")
    add("--python", default="", metavar="FILE", help="with --run-dir: interpreter of another environment")
    add(
        "--in-place",
        action="store_true",
        help="with --run-dir: one worker at a time, each new one on the GPUs of an old one (default: beside them)",
    )
    add_worker_args(parser)
    client.add_timeout(parser, 3600.0, "until the new revision answers the frontend")
    add(
        "--drain-seconds",
        type=not_negative,
        default=600.0,
        metavar="SECONDS",
        help="for an old worker to finish its requests (default: %(default)g)",
    )
    client.add_json(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Returns 0 when the old revision has left; raises a DisaggError (1) for a failure midway, ConfigError (2) for a
    wrong setting.
    """
    given = [f"--{name.replace('_', '-')}" for name in _CHANGES if getattr(args, name)]
    if args.run_dir is None and given:
        raise ConfigError(
            f"{given[0]} needs --run-dir: only `up` starts workers; start them with --worker-revision"
        )
    client.require_one_place(args)
    if args.run_dir is None:
        revisions = (getattr(args, "from") or "", args.to)
        key = client.signer(args).key_id
        outcome = client.change_fleet(
            args,
            lambda workers: roll_out(
                workers, knows_by(args), revisions, args.timeout, args.drain_seconds, key
            ),
            revisions,
        )
    else:
        outcome = client.wish(args, _rollout(args))
    text = f"{outcome['revision']} serves by {len(outcome['serving'])} workers; {len(outcome['left'])} have left, and "
    text += f"gave up {outcome['requests_given_up']} requests"
    print(json.dumps(outcome) if args.json else text)
    return ExitCode.DONE


def _rollout(args: argparse.Namespace) -> Rollout:
    strategy = send_to_up(args.run_dir, Describe())["strategy"]
    configs = engine_configs_in(args.engine_configs, strategy) if args.engine_configs else {}
    return Rollout(
        args.to,
        str(servable_model(args.model)) if args.model else "",
        {role: str(file) for role, file in configs.items()},
        args.python,
        tuple(args.worker_args),
        args.drain_seconds,
        args.in_place,
    )


async def roll_out(
    workers: Workers,
    knows: WhyNot,
    revisions: tuple[str, str],
    timeout: float,
    drain_seconds: float,
    key: str,
) -> dict[str, Any]:
    """Wait until the second of the revisions answers, and have the workers of the first leave. Returns the outcome as
    JSON.

    Raises StageTimeoutError before any worker has left. After a later DisaggError, or the death of this process, both
    revisions serve, or what is left of the old one; the same call completes the rollout.
    """
    old, new = revisions
    fleet = Fleet(workers, FirstStages(knows), client.say)
    there = await all_workers(workers)
    require_key(there, key)
    strategy = next((each.description.strategy for each in there), "decode_first")
    before = [each for each in there if (each.description.revision or "") != new]
    left = {str(each) for each in before}
    wanted = Wanted(strategy, old, following=new, drain_seconds=drain_seconds)

    def is_done(wanted: Wanted, seen: Sequence[Seen]) -> bool:
        left.update(each.name for each in seen if each.revision != new)
        return wanted.revision == new and all(each.revision == new for each in seen)

    late = f"revision {new} does not answer the frontend with a worker of each role; the old ones stay"
    await fleet.reach(wanted, is_done, timeout, late)
    serving = [str(each) for each in fleet.there]
    return {"revision": new, "serving": serving, "left": sorted(left), "requests_given_up": fleet.given_up}
