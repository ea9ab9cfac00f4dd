"""`trtllm-disagg autoscale`: matches the number of workers of each role to the load. Flips first, then scales."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.common.exits import ExitCode, ending_as_on_ctrl_c
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.admin import client, fleet
from trtllm_disagg.tools.admin.fleet import Workers, all_workers, say
from trtllm_disagg.tools.admin.ratio import Goal, Ratio
from trtllm_disagg.tools.flag_types import more_than_zero, positive_up_to
from trtllm_disagg.tools.plan.slo import DEFAULT_SLO as SLO
from trtllm_disagg.tools.plan.slo import slo_of
from trtllm_disagg.tools.top.frontend import FrontendClient
from trtllm_disagg.tools.top.snapshot import Process, Snapshot, WorkerLoad
from trtllm_disagg.tools.up.command_socket import DeploymentDescription, NoUpError, send_to_up
from trtllm_disagg.tools.up.commands import Describe, Scale
from trtllm_disagg.tools.up.look import Described, FirstStages
from trtllm_disagg.tools.up.plan import MAX_WORKERS

if TYPE_CHECKING:
    from trtllm_disagg.tools.top.observers import Observer

_INTERVAL, _FLIP_SECONDS, _RETRY_SECONDS, _PLANNER_SECONDS = 2.0, 120.0, 30.0, 0.5
#: Role -> number of workers.
Numbers = Mapping[str, int]
#: Flips, starts and stops workers until these numbers run.
Reach = Callable[[Numbers], Awaitable[None]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    add, number = parser.add_argument, positive_up_to(2 * MAX_WORKERS)
    add(
        "--frontend",
        metavar="URL",
        action="append",
        help="without --run-dir: frontend to read latencies from; give it once per frontend",
    )
    add("--slo", metavar="LIMITS", help=f"limits in ms (default: ttft={SLO.ttft:g},tpot={SLO.tpot:g})")
    add(
        "--min-workers",
        "--least",  # of 0.2
        type=number,
        default=1,
        metavar="N",
        help="min workers of each role (default: 1)",
    )
    add(
        "--max-workers",
        "--most",  # of 0.2
        type=number,
        metavar="N",
        help="max workers of all roles together (default: the number at the start; with --planner: no limit)",
    )
    add(
        "--interval",
        type=more_than_zero,
        default=_INTERVAL,
        metavar="SECONDS",
        help="time between readings (default: %(default)g)",
    )
    text = "follow Dynamo's Planner, by etcd, instead of --slo [ETCD_ENDPOINTS]"
    add("--planner", action="store_true", help=text)


def run(args: argparse.Namespace) -> ExitCode:
    """Runs until Ctrl-C; returns FAILED when `up` has ended. Raises ConfigError for a wrong setting."""
    slo = slo_of(args.slo)
    if (args.planner and args.slo) or slo.ttft is None or slo.tpot is None or slo.latency:
        raise ConfigError.bad_value("--slo", args.slo, "limits for both ttft and tpot, without --planner")
    client.require_one_place(args)
    ratio = Ratio(Goal(slo.ttft / 1000, slo.tpot / 1000, args.min_workers, args.max_workers))
    with ending_as_on_ctrl_c():
        if args.run_dir is None:
            return _of_fleet(args, ratio)
        try:
            asyncio.run(_of_up(args, ratio))
        except NoUpError as error:
            say(f"error: {error}")
        return ExitCode.FAILED


async def _of_up(args: argparse.Namespace, ratio: Ratio) -> None:
    """Never returns. Raises NoUpError when `up` has ended."""
    from trtllm_disagg.tools.top.observers import observer_of

    description, up = await _describe(args.run_dir), _OfUp(args.run_dir, observer_of(args.run_dir, None))
    ratio.roles = spec_of(description["strategy"]).roles
    if (args.max_workers or math.inf) < (least := args.min_workers * len(ratio.roles)):
        allowed = f"at least {least}, --min-workers {args.min_workers} of each role"
        raise ConfigError.bad_value("--max-workers", args.max_workers, allowed)
    if args.planner:
        with fleet.quiet_runtime(os.environ):
            await _follow_planner(description["namespace"], up.reach, ratio.goal)
    await _keep(up, ratio, args.interval)


async def _describe(run_dir: Path) -> DeploymentDescription:
    description: DeploymentDescription = await asyncio.to_thread(send_to_up, run_dir, Describe())
    return description


@dataclass(frozen=True, slots=True)
class _OfUp:
    """The current revision's workers of an `up`."""

    run_dir: Path
    observer: Observer

    async def look(self) -> Snapshot:
        seen, description = await asyncio.gather(self.observer.look(), _describe(self.run_dir))
        return replace(
            seen, processes=tuple(each for each in seen.processes if each.name in description["workers"])
        )

    async def reach(self, wanted: Numbers) -> None:
        await asyncio.to_thread(send_to_up, self.run_dir, Scale({**wanted}, by_flips=True), _say_below)


def _of_fleet(args: argparse.Namespace, ratio: Ratio) -> ExitCode:
    if args.frontend is None and not args.planner:
        raise ConfigError("--frontend is missing; give the URL of each frontend, or --run-dir of an `up`")

    async def follow(workers: Workers, key: str) -> ExitCode:
        fleet.require_no_up(await all_workers(workers))
        place = _OfFleet(workers, key, args.frontend)
        if args.planner:
            await _follow_planner(fleet.where_of(args)["namespace"], place.reach, ratio.goal)
        await _keep(place, ratio, args.interval)
        return ExitCode.FAILED

    return fleet.connected(args, follow, waits="")


@dataclass(frozen=True, slots=True)
class _OfFleet:
    """Workers that another program starts: they can only flip."""

    workers: Workers
    #: The id of their key.
    key: str
    urls: Sequence[str]

    async def look(self) -> Snapshot:
        from trtllm_disagg.tools.top.observers import ANSWER_SECONDS, FrontendObserver

        frontends = FrontendObserver(*(FrontendClient(each, ANSWER_SECONDS) for each in self.urls))
        seen, there = await asyncio.gather(frontends.look(), all_workers(self.workers))
        return replace(seen, processes=tuple(_process(each) for each in there if each.description.ready))

    async def reach(self, wanted: Numbers) -> None:
        scale = Scale({**wanted}, by_flips=True)
        await fleet.change(self.workers, scale, _FLIP_SECONDS, self.key, FirstStages(), report=_say_below)
        _say_below("these workers can only flip: no `up` on this machine runs them")


def _process(worker: Described) -> Process:
    description, used = worker.description, worker.description.kv_occupancy
    blocks = {} if used is None else {"kv_blocks": round(1000 * used), "kv_blocks_total": 1000}
    load = WorkerLoad(batch=description.queued_requests, **blocks)
    return Process(str(worker), description.role, "ready", load=load)


async def _keep(place: _OfUp | _OfFleet, ratio: Ratio, interval: float) -> None:
    """Never returns. Raises NoUpError."""
    while True:
        seen = await place.look()
        if seen.doubt:
            _say(seen.doubt)
            ratio.forget()
        elif wanted := ratio.after(seen):
            await _is_reached(place.reach, wanted.workers, wanted.why)
        await asyncio.sleep(interval)


async def _is_reached(reach: Reach, wanted: Numbers, why: str) -> bool:
    """False when a worker cannot flip or start, for example because no GPU is free. Raises NoUpError."""
    _say(f"{_shown(wanted)}: {why}")
    try:
        await reach(wanted)
    except NoUpError:
        raise
    except DisaggError as error:
        _say(f"not done: {error}")
        return False
    return True


async def _follow_planner(namespace: str, reach: Reach, goal: Goal) -> None:
    """Never returns. Follows the newest decision, even while an older one is under way or failing, and confirms each
    one that is reached. Raises NoUpError, and ConfigError when etcd cannot be reached.
    """
    from trtllm_disagg.tools.admin.controller import planner

    async with planner(namespace) as decisions:
        seen, attempt, again_at = None, None, 0.0
        while True:
            now = await decisions.newest()
            if now.workers and (now.id != seen or (attempt is None and time.monotonic() >= again_at)):
                if attempt is not None:
                    attempt.cancel()
                seen, again_at = now.id, time.monotonic() + _RETRY_SECONDS
                within = _within(now.workers, goal)
                attempt = asyncio.create_task(_is_reached(reach, within, "decision of the planner"))
            if attempt is not None and attempt.done():
                if attempt.result():
                    await decisions.confirm(now)
                    again_at = math.inf
                attempt = None
            await asyncio.sleep(_PLANNER_SECONDS)


def _within(wanted: Numbers, goal: Goal) -> Numbers:
    """At least --min-workers per role and at most --max-workers in all; the larger role loses the surplus."""
    within = {role: max(number, goal.min_workers) for role, number in wanted.items()}
    while (
        goal.max_workers
        and sum(within.values()) > goal.max_workers
        and max(within.values()) > goal.min_workers
    ):
        within[max(within, key=lambda role: within[role])] -= 1
    if within != wanted:
        _say_below(f"{_shown(wanted)} is outside --min-workers and --max-workers")
    return within


def _say(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')} {text}")


def _say_below(text: str) -> None:
    say(f"  {text}")


def _shown(workers: Numbers) -> str:
    return ", ".join(f"{number} {role}" for role, number in workers.items())
