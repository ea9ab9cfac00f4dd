"""`trtllm-disagg flip`: has a running worker serve in the other role, around the engine that it has loaded."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from trtllm_disagg.admin.commands import Flip
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.client import Worker, all_workers
from trtllm_disagg.tools.admin.fleet import Fleet
from trtllm_disagg.tools.up.look import FirstStages, as_assumed_after
from trtllm_disagg.tools.up.reconcile import Phase, Seen, Wanted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--instance",
        required=True,
        metavar="ID",
        help="the worker: its instance id, hexadecimal, or with --run-dir the name of its process, as `top` has it",
    )
    add("--to", required=True, choices=(Role.PREFILL.value, Role.DECODE.value), help="its new role")
    add(
        "--force",
        action="store_true",
        help="even if it is the last worker of its role, or its engine suits the other one",
    )
    client.add_arguments(parser)
    client.add_timeout(parser, 60.0, "until it serves in its new role")
    client.add_json(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Raises ConfigError for a wrong setting (2), a DisaggError for a refusal or a failure (1)."""
    command = Flip(args.to, args.force, args.instance)
    if args.run_dir is None:
        outcome = client.change_fleet(args, lambda workers: flip(workers, command, args.timeout))
    else:
        outcome = client.wish(args, command)
    print(json.dumps(outcome) if args.json else shown(outcome))
    return ExitCode.DONE


def shown(outcome: dict[str, Any]) -> str:
    return "{was} flipped to {role} in {seconds:.2f} s; its id is now {instance}".format(**outcome)


async def flip(workers: client.Workers, command: Flip, timeout: float) -> dict[str, Any]:
    """Returns the outcome as JSON. Raises ConfigError before the worker is asked, DisaggError when it refuses or could
    not enter the new role, StageTimeoutError when it is not there after `timeout` seconds: it goes on.
    """
    fleet = Fleet(workers, FirstStages(as_assumed_after(0.0)), client.say)
    there = await all_workers(workers)
    one = next((each for each in there if f"{each.instance_id:x}" == command.process.lower()), None)
    if one is None:
        raise ConfigError.bad_value(
            "--instance", command.process, f"one of {', '.join(map(str, there)) or 'none'}"
        )
    began = time.monotonic()
    wanted = Wanted(
        one.description.strategy,
        one.description.revision or "",
        roles={str(one): command.to},
        forced=frozenset({str(one)} if command.force else ()),
    )

    def is_so(wanted: Wanted, seen: Sequence[Seen]) -> bool:
        after = _after_flip(fleet.there, one)
        if after and after.description.ready and after.description.role != command.to:
            raise DisaggError(f"{one} could not become {command.to}, and is {after}: its log says why")
        by_name = {each.name: each for each in seen}
        return after is not None and by_name[str(after)].phase is Phase.SERVING

    if (one.description.role, bool(one.description.flipped_from)) != (command.to, True):
        await fleet.reach(
            wanted, is_so, timeout, f"{one} is not {command.to}: it finishes its requests first"
        )
    now = _after_flip(fleet.there, one) or one
    return {
        "was": str(one),
        "role": command.to,
        "instance": f"{now.instance_id:x}",
        "process": now.description.process,
        "seconds": time.monotonic() - began,
        "warnings": fleet.warnings,
    }


def _after_flip(there: Sequence[Worker], one: Worker) -> Worker | None:
    """The worker with the id of its new role."""
    return next((each for each in there if each.description.flipped_from == f"{one.instance_id:x}"), None)
