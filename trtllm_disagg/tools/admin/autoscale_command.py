"""`trtllm-disagg autoscale`: keeps the number of workers of each role right, as the load changes. Workers change roles
first; what is missing then an `up` starts, and what is too much it stops.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trtllm_disagg.admin.commands import Describe, Flip, Scale
from trtllm_disagg.config.settings import more_than_zero, positive_up_to
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.processes.exits import ExitCode, ending_as_on_ctrl_c
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.client import Worker, Workers, all_workers
from trtllm_disagg.tools.admin.flip_command import flip, shown
from trtllm_disagg.tools.admin.ratio import Goal, Ratio
from trtllm_disagg.tools.plan.slo import DEFAULT_SLO as SLO
from trtllm_disagg.tools.plan.slo import slo_of
from trtllm_disagg.tools.top.frontend import FrontendClient
from trtllm_disagg.tools.top.snapshot import Process, Snapshot, WorkerLoad
from trtllm_disagg.tools.up.command_socket import DeploymentDescription, NoUpError, send_to_up
from trtllm_disagg.tools.up.plan import MOST_WORKERS

if TYPE_CHECKING:
    from trtllm_disagg.tools.top.observers import Observer

_INTERVAL, _FLIP_SECONDS, _RETRY_SECONDS, _PLANNER_SECONDS = 2.0, 120.0, 30.0, 0.5
#: (new role, old role)
_FLIPS: tuple[tuple[Literal["prefill", "decode"], str], ...] = (("prefill", "decode"), ("decode", "prefill"))
#: Numbers of workers by role.
Numbers = Mapping[str, int]
#: Has workers flip, start and stop until the numbers are there.
Reach = Callable[[Numbers], Awaitable[None]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    add, number = parser.add_argument, positive_up_to(2 * MOST_WORKERS)
    add(
        "--frontend", metavar="URL", action="append", help="without --run-dir: each frontend: its times count"
    )
    add("--slo", metavar="LIMITS", help=f"in milliseconds (default: ttft={SLO.ttft:g},tpot={SLO.tpot:g})")
    add("--least", type=number, default=1, metavar="N", help="workers of each role, at least (default: 1)")
    add(
        "--most",
        type=number,
        metavar="N",
        help="workers of all roles, at most (default: as many as run when it begins; with --planner: no limit)",
    )
    add(
        "--interval",
        type=more_than_zero,
        default=_INTERVAL,
        metavar="SECONDS",
        help="between looks (default: %(default)g)",
    )
    add(
        "--planner",
        action="store_true",
        help="instead of limits: what Dynamo's planner decides for this namespace, in etcd [ETCD_ENDPOINTS]",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Until Ctrl-C; FAILED when the `up` has ended. Raises ConfigError for a wrong setting."""
    slo = slo_of(args.slo)
    if (args.planner and args.slo) or slo.ttft is None or slo.tpot is None or slo.latency:
        raise ConfigError.bad_value("--slo", args.slo, "both ttft and tpot, and not --planner")
    client.require_one_place(args)
    ratio = Ratio(Goal(slo.ttft / 1000, slo.tpot / 1000, args.least, args.most))
    with ending_as_on_ctrl_c():
        if args.run_dir is None:
            return _of_fleet(args, ratio)
        try:
            asyncio.run(_of_up(args, ratio))
        except NoUpError as error:
            client.say(f"error: {error}")
        return ExitCode.FAILED


async def _of_up(args: argparse.Namespace, ratio: Ratio) -> None:
    """Never returns. Raises NoUpError when the `up` has ended."""
    from trtllm_disagg.tools.top.observers import observer_of

    told = await _describe(args.run_dir)

    async def reach(wanted: Numbers) -> None:
        # Flips come first; only what is missing then starts, and what is too much stops.
        await asyncio.to_thread(send_to_up, args.run_dir, Scale({**wanted}, by_flips=True), _say_below)

    if args.planner:
        with client.quiet_runtime(os.environ):
            await _follow_planner(told["namespace"], reach, ratio.goal)
    ratio.roles = spec_of(told["strategy"]).roles
    await _keep(_OfUp(args.run_dir, observer_of(args.run_dir, None)), ratio, reach, args.interval)


async def _describe(run_dir: Path) -> DeploymentDescription:
    told: DeploymentDescription = await asyncio.to_thread(send_to_up, run_dir, Describe())
    return told


@dataclass(frozen=True, slots=True)
class _OfUp:
    """Observes the workers of an `up` that count: those of a revision that comes or leaves do not."""

    run_dir: Path
    observer: Observer

    async def look(self) -> Snapshot:
        seen, told = await asyncio.gather(self.observer.look(), _describe(self.run_dir))
        return replace(seen, processes=tuple(each for each in seen.processes if each.name in told["workers"]))


def _of_fleet(args: argparse.Namespace, ratio: Ratio) -> ExitCode:
    if args.frontend is None and not args.planner:
        raise ConfigError(
            "--frontend is missing: the URL of each frontend, whose times count; or --run-dir of an `up`"
        )

    async def follow(workers: Workers) -> ExitCode:
        async def reach(wanted: Numbers) -> None:
            await _flip_towards(wanted, workers)
            _say_below("workers that no `up` here has started only flip")

        if args.planner:
            await _follow_planner(client.where_of_fleet(args)["namespace"], reach, ratio.goal)
        from trtllm_disagg.tools.top.observers import ANSWER_SECONDS, FrontendObserver

        frontend = FrontendObserver(*(FrontendClient(each, ANSWER_SECONDS) for each in args.frontend))
        await _keep(_OfFleet(workers, frontend), ratio, reach, args.interval)
        return ExitCode.FAILED

    return client.change_fleet(args, follow, waits="")


@dataclass(frozen=True, slots=True)
class _OfFleet:
    """Observes workers that no `up` of this machine has started, by what they and a frontend say."""

    workers: Workers
    frontend: Observer

    async def look(self) -> Snapshot:
        seen, there = await asyncio.gather(self.frontend.look(), all_workers(self.workers))
        return replace(seen, processes=tuple(_process(each) for each in there if each.description.ready))


def _process(worker: Worker) -> Process:
    told = worker.description
    blocks = (None, None) if told.kv_occupancy is None else (round(1000 * told.kv_occupancy), 1000)
    load = WorkerLoad(batch=told.queued_requests, kv_blocks=blocks[0], kv_blocks_total=blocks[1])
    return Process(str(worker), told.role, "ready", load=load)


async def _keep(observer: Observer, ratio: Ratio, reach: Reach, interval: float) -> None:
    """Never returns. Raises NoUpError."""
    while True:
        seen = await observer.look()
        if seen.doubt:
            client.say(f"{_now()} {seen.doubt}")
            ratio.forget()
        elif wanted := ratio.after(seen):
            await _is_reached(reach, wanted.workers, wanted.why)
        await asyncio.sleep(interval)


async def _is_reached(reach: Reach, wanted: Numbers, why: str) -> bool:
    """False when a worker cannot flip or start: no GPU is free, for example. Raises NoUpError."""
    client.say(f"{_now()} {_shown(wanted)}: {why}")
    try:
        await reach(wanted)
    except NoUpError:
        raise
    except DisaggError as error:
        client.say(f"{_now()} not done: {error}")
        return False
    return True


async def _follow_planner(namespace: str, reach: Reach, goal: Goal) -> None:
    """Never returns. The newest decision counts, also while an older one is on its way or cannot be reached; what is
    reached is confirmed. Raises NoUpError, and ConfigError when etcd cannot be reached.
    """
    from trtllm_disagg.dynamo_runtime.controller import planner

    async with planner(namespace) as decisions:
        seen, attempt, again_at = None, None, 0.0
        while True:
            now = await decisions.newest()
            if now.workers and (now.id != seen or (attempt is None and time.monotonic() >= again_at)):
                if attempt is not None:
                    attempt.cancel()
                seen, again_at = now.id, time.monotonic() + _RETRY_SECONDS
                within = _within(now.workers, goal)
                attempt = asyncio.create_task(_is_reached(reach, within, "the planner's decision"))
            if attempt is not None and attempt.done():
                if attempt.result():
                    await decisions.confirm(now)
                    again_at = math.inf
                attempt = None
            await asyncio.sleep(_PLANNER_SECONDS)


def _within(wanted: Numbers, goal: Goal) -> Numbers:
    """At least --least of each role, and at most --most in all: then those of the larger role are fewer."""
    within = {role: max(number, goal.least) for role, number in wanted.items()}
    while goal.most and sum(within.values()) > goal.most and max(within.values()) > goal.least:
        within[max(within, key=lambda role: within[role])] -= 1
    if within != wanted:
        _say_below(f"{_shown(wanted)} is outside of --least and --most")
    return within


async def _flip_towards(wanted: Numbers, workers: Workers) -> None:
    """Workers with the fewest requests change roles, until one role has as many as are wanted."""
    there = [each for each in await all_workers(workers) if each.description.ready]
    have = Counter(each.description.role.value for each in there)
    for to, of in _FLIPS:
        while have[to] < wanted.get(to, 0) and have[of] > wanted.get(of, have[of]):
            able = (each for each in there if each.description.role == of)
            one = min(able, key=lambda each: each.description.whole_requests)
            outcome = await flip(workers, Flip(to, process=f"{one.instance_id:x}"), _FLIP_SECONDS)
            _say_below(shown(outcome))
            there.remove(one)
            have.update({to: 1, of: -1})


def _say_below(text: str) -> None:
    client.say(f"  {text}")


def _shown(workers: Numbers) -> str:
    return ", ".join(f"{number} {role}" for role, number in workers.items())


def _now() -> str:
    return time.strftime("%H:%M:%S")
