"""`trtllm-disagg rollout`: the workers of a new revision take the place of the old ones, while both serve.

Each revision has a namespace of its own, so pairs form within it, and Dynamo's frontend sends each request to one of
them, by the number of their first stages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from trtllm_disagg.admin.commands import Describe, Leave, Rollout
from trtllm_disagg.config.args import argument_parser_of
from trtllm_disagg.config.settings import not_negative
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError, PeerUnavailableError, StageTimeoutError
from trtllm_disagg.model_directory import servable_model
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.client import Up, Worker, Workers, all_workers
from trtllm_disagg.tools.admin.switch_command import Knows, Say, add_frontend, knows_by, until_known
from trtllm_disagg.tools.up.command_socket import send_to_up
from trtllm_disagg.tools.up.up_command import add_worker_args, engine_configs_in

_POLL_SECONDS = 0.5
#: What `up` starts the new workers with.
_CHANGES = ("model", "engine_configs", "python", "worker_args")


async def roll_out(
    workers: Workers, knows: Knows, to: str, timeout: float, drain_seconds: float, say: Say
) -> dict[str, Any]:
    """Wait until the revision `to` serves, and have the workers of all others leave: first the stage that takes
    requests, and when its requests have ended the other one. Returns the outcome as JSON.

    Raises StageTimeoutError before any worker has left. After a later DisaggError, or the death of this process, both
    revisions serve, or what is left of the old one; the same call completes the rollout.
    """
    new, old = await _until_ready(workers, to, timeout)
    takers = (spec_of(new[0].is_.strategy).entry_role or Role.DECODE, Role.AGG)
    first = [each for each in new if each.is_.registered and each.is_.role in takers]
    await until_known(workers, first, knows, timeout)
    say(f"revision {to} serves")
    given_up = 0
    for role in (*spec_of(new[0].is_.strategy).stop_order, "agg"):
        leaving = [_leave(workers, each, drain_seconds, say) for each in old if each.is_.role == role]
        given_up += sum(await asyncio.gather(*leaving))
    names = {"serving": [*map(str, new)], "left": [*map(str, old)]}
    return {"revision": to, **names, "requests_given_up": given_up}


async def _until_ready(workers: Workers, to: str, timeout: float) -> tuple[list[Worker], list[Worker]]:
    """The workers of `to`, with each role that others have, and those others."""
    deadline = time.monotonic() + timeout
    while True:
        there = await all_workers(workers)
        new, old = (
            [each for each in there if (each.is_.revision == to) is is_new] for is_new in (True, False)
        )
        missing = {each.is_.role for each in old} - {each.is_.role for each in new}
        if not missing and any(each.is_.registered for each in new):
            return new, old
        if time.monotonic() > deadline:
            lacks = f"no {' and no '.join(sorted(missing))} worker" if missing else "no first stage"
            raise StageTimeoutError(
                f"{lacks} of revision {to} is ready after {timeout:g} s; the old ones stay"
            )
        await asyncio.sleep(_POLL_SECONDS)


async def _leave(workers: Workers, each: Worker, seconds: float, say: Say) -> int:
    """Returns how many of its requests were given up."""
    say(f"{each} finishes its requests and leaves")
    try:
        answer = await workers.send(each.endpoint_id, each.instance_id, Leave(seconds))
    except PeerUnavailableError as error:
        say(f"{each} ended meanwhile: {error}")
        return 0
    return int(answer["requests_left"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    add_frontend(parser)
    add = parser.add_argument
    name = argument_parser_of("worker_revision", "--to")
    add("--to", required=True, type=name, metavar="NAME", help="the new revision")
    add("--from", metavar="NAME", help="without --run-dir: the old one (default: workers without a revision)")
    add("--model", metavar="MODEL", help="with --run-dir: of the new workers (default of these: as before)")
    add("--engine-configs", type=Path, metavar="DIR", help="with --run-dir: as of `up`")
    add("--python", default="", metavar="FILE", help="with --run-dir: interpreter of another environment")
    add_worker_args(parser)
    for flag, default, what in (
        ("--timeout", 3600.0, "for a pair of the new revision to be ready"),
        ("--drain-seconds", 600.0, "for an old worker to finish its requests"),
    ):
        add(
            flag, type=not_negative, default=default, metavar="SECONDS", help=f"{what} (default: %(default)g)"
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
    revisions = (args.to,) if args.run_dir else (getattr(args, "from") or "", args.to)

    async def change(workers: Workers, up: Up) -> ExitCode:
        if args.run_dir is not None:
            await asyncio.to_thread(_start, args)
        knows = knows_by(args, up)
        outcome = await roll_out(workers, knows, args.to, args.timeout, args.drain_seconds, client.say)
        serving, left = len(outcome["serving"]), len(outcome["left"])
        text = f"{args.to} serves by {serving} workers; {left} have left, and gave up {{requests_given_up}} requests"
        print(json.dumps(outcome) if args.json else text.format(**outcome))
        return ExitCode.DONE

    return client.change_deployment(args, change, revisions)


def _start(args: argparse.Namespace) -> None:
    """Have `up` start the new workers, unless they serve already."""
    strategy = send_to_up(args.run_dir, Describe())["strategy"]
    configs = engine_configs_in(args.engine_configs, strategy) if args.engine_configs else {}
    rollout = Rollout(
        args.to,
        str(servable_model(args.model)) if args.model else "",
        {role: str(file) for role, file in configs.items()},
        args.python,
        tuple(args.worker_args),
    )
    send_to_up(args.run_dir, rollout, client.say)
