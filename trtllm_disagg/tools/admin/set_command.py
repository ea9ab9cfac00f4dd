"""`trtllm-disagg set`: changes thresholds of the workers of a running deployment."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtllm_disagg.admin.commands import Set
from trtllm_disagg.config.args import argument_parser_of
from trtllm_disagg.config.settings import not_negative
from trtllm_disagg.config.thresholds import ADMISSION, NAMES
from trtllm_disagg.config.worker_config import SETTINGS, flag_of
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.strategies import switchable
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.client import Up, Worker, Workers, all_workers

Values = Mapping[str, Any]

_POLL_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    only = "only this worker, hexadecimal (default: all)"
    parser.add_argument("--instance", metavar="ID", type=_instance_id, help=only)
    for name in NAMES:
        parser.add_argument(
            flag_of(name),
            type=argument_parser_of(name),
            metavar="N",
            help=f"{SETTINGS[name].help.partition(' (default: ')[0]} (default: as it is)",
        )
    parser.add_argument(
        "--timeout",
        type=not_negative,
        default=60.0,
        metavar="SECONDS",
        help="for workers that are starting (default: %(default)g)",
    )
    client.add_json(parser)


def _instance_id(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        allowed = "a hexadecimal instance id, as logs and answers have it"
        raise ConfigError.bad_value("--instance", text, allowed) from None


def run(args: argparse.Namespace) -> ExitCode:
    """Returns FAILED when a worker could not be changed. Raises ConfigError for a wrong setting."""
    values = {name: getattr(args, name) for name in NAMES if getattr(args, name) is not None}
    if not values:
        raise ConfigError(f"give at least one of {', '.join(map(flag_of, NAMES))}")
    instance: int | None = args.instance

    async def change(workers: Workers, up: Up) -> ExitCode:
        say = (lambda text: None) if args.json else print
        changes = await set_thresholds(workers, values, instance, say, client.say)
        # What no worker has taken would keep those that `up` starts later from starting.
        if instance is None and any(each.error is None for each in changes):
            up.change_new_workers(Set(values))
            late = await _late_after(args.timeout, up)
            changes += await set_thresholds(workers, values, None, say, client.say, done=changes)
            for each in late:
                client.say(f"error: {each.worker}: {each.error}")
            changes += late
        if args.json:
            print(json.dumps([asdict(each) for each in changes]))
        return ExitCode.FAILED if any(each.error for each in changes) else ExitCode.DONE

    return client.set_all(args, change)


@dataclass(frozen=True, slots=True)
class Change:
    """The outcome for one worker. `changed`: thresholds with old and new value; `error`: why they were not changed."""

    worker: str
    changed: tuple[str, ...] = ()
    error: str | None = None


async def _late_after(seconds: float, up: Up) -> list[Change]:
    """Wait for workers that were starting with the old thresholds, and return those that still are after `seconds`:
    loading a large model takes up to an hour, and other commands wait for this one.
    """
    late, deadline = up.starting(), time.monotonic() + seconds
    if late:
        client.say(
            f"waiting for {', '.join(sorted(late))}: started with the old thresholds, and not ready yet"
        )
    while (late := late & up.starting()) and time.monotonic() < deadline:  # noqa: ASYNC110 - `up` writes it to a file
        await asyncio.sleep(_POLL_SECONDS)
    why = f"still starting after {seconds:g} s, with the old thresholds; set them again when it is ready"
    return [Change(each, error=why) for each in sorted(late)]


async def set_thresholds(
    workers: Workers,
    values: Values,
    instance: int | None,
    say: Callable[[str], None],
    complain: Callable[[str], None],
    done: Sequence[Change] = (),
) -> list[Change]:
    """Change the thresholds of all workers but those in `done`, and report each worker as soon as it has answered.

    Raises ConfigError, before any worker is changed, when none uses these thresholds.
    """
    changes: list[Change] = []
    before = {each.worker for each in done}
    for each in _chosen(await all_workers(workers), values, instance):
        if str(each) in before:
            continue
        try:
            answer = await workers.send(each.endpoint_id, each.instance_id, Set(dict(values)))
        except DisaggError as error:
            complain(f"error: {each}: {error}")
            changes.append(Change(str(each), error=str(error)))
        else:
            changes.append(Change(str(each), tuple(answer.get("changed") or ())))
            say(f"{each}: {', '.join(changes[-1].changed) or 'has these already'}")
    return changes


def _chosen(workers: Sequence[Worker], values: Values, instance: int | None) -> list[Worker]:
    if not workers:
        raise ConfigError(
            "no worker of any role is there to be set: wait until one is ready, or give the --run-dir or the "
            "--namespace of the deployment"
        )
    for_all = set(values) <= set(ADMISSION)
    takers = [
        each
        for each in workers
        if for_all or (each.description.role != "agg" and each.description.strategy in switchable())
    ]
    if not takers:
        there = ", ".join(f"{each} under {each.description.strategy}" for each in workers)
        raise ConfigError.bad_value(
            "set", "thresholds", f"prefill or decode workers of {', '.join(switchable())}; there is: {there}"
        )
    if instance is None:
        return takers
    chosen = [each for each in takers if each.instance_id == instance]
    if not chosen:
        raise ConfigError.bad_value("--instance", f"{instance:x}", f"one of {', '.join(map(str, takers))}")
    return chosen
