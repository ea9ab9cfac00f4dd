"""`trtllm-disagg autoscale`: keeps the number of workers of each role right, as the load changes. Workers change roles
first; what is missing then an `up` starts, and what is too much it stops.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from trtllm_disagg.admin.commands import Describe, Flip, Scale
from trtllm_disagg.config.settings import more_than_zero, positive_up_to
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.processes.exits import ExitCode, ending_as_on_ctrl_c
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.client import Up, Worker, Workers, all_workers
from trtllm_disagg.tools.admin.flip_command import flip
from trtllm_disagg.tools.admin.ratio import Goal, Ratio
from trtllm_disagg.tools.plan.slo import DEFAULT_SLO as SLO
from trtllm_disagg.tools.plan.slo import slo_of
from trtllm_disagg.tools.top.frontend import FrontendClient
from trtllm_disagg.tools.top.snapshot import Process, Snapshot, WorkerLoad
from trtllm_disagg.tools.up.command_socket import NoUpError, send_to_up
from trtllm_disagg.tools.up.plan import MOST_WORKERS

if TYPE_CHECKING:
    from trtllm_disagg.tools.top.observers import Observer

_INTERVAL, _FLIP_SECONDS, _RETRY_SECONDS = 2.0, 120.0, 30.0
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
    add("--least", type=number, default=1, metavar="N", help="workers of each role (default: 1)")
    add(
        "--most",
        type=number,
        metavar="N",
        help="workers of all roles (default: as many as run when it begins)",
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

    described = await asyncio.to_thread(send_to_up, args.run_dir, Describe())

    async def reach(wanted: Numbers) -> None:
        if len(wanted) > 1:
            await asyncio.to_thread(client.change_deployment, args, partial(_flip_towards, wanted))
        await asyncio.to_thread(send_to_up, args.run_dir, Scale({**wanted}), _say_below)

    if args.planner:
        with client.quiet_runtime(os.environ):
            await _follow_planner(described["namespace"], reach)
    await _keep(observer_of(args.run_dir, None), ratio, reach, args.interval)


def _of_fleet(args: argparse.Namespace, ratio: Ratio) -> ExitCode:
    if args.frontend is None and not args.planner:
        raise ConfigError(
            "--frontend is missing: the URL of each frontend, whose times count; or --run-dir of an `up`"
        )

    async def follow(workers: Workers, up: Up) -> ExitCode:
        async def reach(wanted: Numbers) -> None:
            await _flip_towards(wanted, workers, up)
            _say_below("workers that no `up` here has started only flip")

        if args.planner:
            await _follow_planner(client.where_of_fleet(args)["namespace"], reach)
        from trtllm_disagg.tools.top.observers import ANSWER_SECONDS, FrontendObserver

        frontend = FrontendObserver(*(FrontendClient(each, ANSWER_SECONDS) for each in args.frontend))
        await _keep(_Fleet(workers, frontend), ratio, reach, args.interval)
        return ExitCode.FAILED

    return client.change_deployment(args, follow, waits="")


class _Fleet:
    """Observes workers that no `up` of this machine has started, by what they and a frontend say."""

    def __init__(self, workers: Workers, frontend: Observer) -> None:
        self._workers = workers
        self._frontend = frontend

    async def look(self) -> Snapshot:
        seen, there = await asyncio.gather(self._frontend.look(), all_workers(self._workers))
        return replace(seen, processes=tuple(_process(each) for each in there if each.is_.ready))


def _process(worker: Worker) -> Process:
    share = worker.is_.kv_occupancy
    blocks = (None, None) if share is None else (round(1000 * share), 1000)
    load = WorkerLoad(batch=worker.is_.queued_requests, kv_blocks=blocks[0], kv_blocks_total=blocks[1])
    return Process(str(worker), worker.is_.role, "ready", load=load)


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


async def _follow_planner(namespace: str, reach: Reach) -> None:
    """Never returns. A decision that cannot be reached is tried again, and not confirmed. Raises NoUpError, and
    ConfigError when etcd cannot be reached.
    """
    from trtllm_disagg.dynamo_runtime.controller import planned_workers

    async with aclosing(planned_workers(namespace)) as decisions:
        async for wanted in decisions:
            while not await _is_reached(reach, wanted, "the planner's decision"):  # noqa: ASYNC110
                await asyncio.sleep(_RETRY_SECONDS)


async def _flip_towards(wanted: Numbers, workers: Workers, up: Up) -> ExitCode:
    """Workers with the fewest requests change roles, until one role has as many as are wanted."""
    there = [each for each in await all_workers(workers) if each.is_.ready]
    have = Counter(each.is_.role.value for each in there)
    for to, of in _FLIPS:
        while have[to] < wanted.get(to, 0) and have[of] > wanted.get(of, have[of]):
            one = min(
                (each for each in there if each.is_.role == of), key=lambda each: each.is_.whole_requests
            )
            outcome, worker = await flip(workers, one.instance_id, Flip(to), _FLIP_SECONDS)
            up.change_new_workers(Flip(to, process=worker.is_.process))
            _say_below(str(outcome))
            there.remove(one)
            have.update({to: 1, of: -1})
    return ExitCode.DONE


def _say_below(text: str) -> None:
    client.say(f"  {text}")


def _shown(workers: Numbers) -> str:
    return ", ".join(f"{number} {role}" for role, number in workers.items())


def _now() -> str:
    return time.strftime("%H:%M:%S")
