"""`trtllm-disagg flip`: has a running worker serve in the other role, around the engine that it has loaded."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass

from trtllm_disagg.admin.commands import Flip
from trtllm_disagg.config.settings import not_negative
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError, DisaggError, PeerUnavailableError, StageTimeoutError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.client import Up, Worker, Workers, all_workers

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Flipped:
    """The outcome of a flip. `instance`: the id in the new role, hexadecimal."""

    was: str
    role: str
    instance: str
    seconds: float
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.was} is {self.role} {self.instance}, after {self.seconds:.2f} s"


async def flip(workers: Workers, instance: int, command: Flip, timeout: float) -> tuple[Flipped, Worker]:
    """Raises ConfigError before the worker is asked, DisaggError when it refuses, and when it could not enter the new
    role; StageTimeoutError when it is not there after `timeout` seconds: it goes on.
    """
    there = await all_workers(workers)
    one = next((each for each in there if each.instance_id == instance), None)
    if one is None:
        listed = ", ".join(map(str, there)) or "none"
        raise ConfigError.bad_value("--instance", f"{instance:x}", f"one of {listed}")
    if one.is_.role == command.to and one.is_.flipped_from:
        return Flipped(str(one), command.to, f"{instance:x}", 0.0), one
    began = time.monotonic()
    try:
        answer = await workers.send(one.endpoint_id, instance, command)
    except PeerUnavailableError:  # it may have left before its answer came
        answer = {}
    warnings = tuple(map(str, answer.get("warnings") or ()))
    for warning in warnings:
        client.say(f"warning: {warning}")
    while time.monotonic() - began < timeout:
        for each in await all_workers(workers):
            if each.is_.flipped_from == f"{instance:x}" and each.is_.ready:
                if each.is_.role != command.to:
                    raise DisaggError(f"{one} could not become {command.to}, and is {each}: its log says why")
                seconds = time.monotonic() - began
                return Flipped(str(one), command.to, f"{each.instance_id:x}", seconds, warnings), each
        await asyncio.sleep(_POLL_SECONDS)
    raise StageTimeoutError(f"{one} is not {command.to} after {timeout:g} s; it finishes its requests first")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--instance", required=True, metavar="ID", type=client.instance_id, help="the worker, hexadecimal")
    add("--to", required=True, choices=(Role.PREFILL.value, Role.DECODE.value), help="its new role")
    add("--force", action="store_true", help="even if it is the last worker of its role")
    client.add_arguments(parser)
    add(
        "--timeout",
        type=not_negative,
        default=60.0,
        metavar="SECONDS",
        help="until it serves in its new role (default: %(default)g)",
    )
    client.add_json(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Raises ConfigError for a wrong setting (2), a DisaggError for a refusal or a failure (1)."""

    async def change(workers: Workers, up: Up) -> ExitCode:
        outcome, worker = await flip(workers, args.instance, Flip(args.to, args.force), args.timeout)
        up.change_new_workers(Flip(args.to, process=worker.is_.process))
        print(json.dumps(asdict(outcome)) if args.json else outcome)
        return ExitCode.DONE

    return client.change_deployment(args, change)
