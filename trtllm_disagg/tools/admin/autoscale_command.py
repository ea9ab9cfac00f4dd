"""`trtllm-disagg autoscale`: keeps the number of workers of each role right, as the load of a running `up` changes."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

from trtllm_disagg.admin.commands import Describe, Scale
from trtllm_disagg.config.settings import more_than_zero, positive_up_to
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.processes.exits import ExitCode, ending_as_on_ctrl_c
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.ratio import Goal, Ratio
from trtllm_disagg.tools.plan.slo import DEFAULT_SLO as SLO
from trtllm_disagg.tools.plan.slo import slo_of
from trtllm_disagg.tools.top.observers import Observer, observer_of
from trtllm_disagg.tools.up.command_socket import NoUpError, send_to_up
from trtllm_disagg.tools.up.plan import MOST_WORKERS

_SECONDS, _ANSWER_SECONDS = 2.0, 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, number = parser.add_argument, positive_up_to(2 * MOST_WORKERS)
    add("--run-dir", type=Path, required=True, metavar="DIR", help="run directory of a running `up`")
    add("--slo", metavar="LIMITS", help=f"in milliseconds (default: ttft={SLO.ttft:g},tpot={SLO.tpot:g})")
    add("--least", type=number, default=1, metavar="N", help="workers of each role (default: 1)")
    add(
        "--most",
        type=number,
        default=0,
        metavar="N",
        help="workers (default: as many as run, so that none starts)",
    )
    add(
        "--interval",
        type=more_than_zero,
        default=_SECONDS,
        help="seconds between looks (default: %(default)g)",
    )
    add(
        "--planner",
        action="store_true",
        help="instead of limits: what Dynamo's planner decides for this namespace, in etcd [ETCD_ENDPOINTS]",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Until Ctrl-C; FAILED when its `up` has ended. Raises ConfigError for a wrong setting."""
    slo = slo_of(args.slo)
    if (args.planner and args.slo) or slo.ttft is None or slo.tpot is None or slo.latency:
        raise ConfigError.bad_value("--slo", args.slo, "both ttft and tpot, and not --planner")
    goal = Goal(slo.ttft / 1000, slo.tpot / 1000, args.least, args.most)
    described = send_to_up(args.run_dir, Describe())
    try:
        with ending_as_on_ctrl_c():
            if args.planner:
                with client.quiet_runtime(os.environ):
                    asyncio.run(_follow_planner(described["namespace"], args.run_dir))
            asyncio.run(_keep(observer_of(args.run_dir, None), Ratio(goal), args.run_dir, args.interval))
    except NoUpError as error:
        client.say(f"error: {error}")
    return ExitCode.FAILED


async def _keep(observer: Observer, ratio: Ratio, run_dir: Path, interval: float) -> None:
    """Never returns. Raises NoUpError."""
    while True:
        seen = await observer.look()
        if seen.doubt:
            await asyncio.to_thread(send_to_up, run_dir, Describe(), seconds=_ANSWER_SECONDS)
        elif wanted := ratio.after(seen):
            client.say(f"{_now()} {_shown(wanted.workers)}: {wanted.why}")
            try:
                await _scale(run_dir, wanted.workers)
            except NoUpError:
                raise
            except DisaggError as error:  # no GPU is free, for example; the next looks may say the same
                client.say(f"{_now()} not done: {error}")
        await asyncio.sleep(interval)


async def _follow_planner(namespace: str, run_dir: Path) -> None:
    """Never returns. Raises NoUpError, and ConfigError when etcd cannot be reached or a number is not allowed."""
    from trtllm_disagg.dynamo_runtime.controller import planned_workers

    async with aclosing(planned_workers(namespace)) as decisions:
        async for workers in decisions:
            client.say(f"{_now()} {_shown(workers)}: the planner's decision")
            await _scale(run_dir, workers)


async def _scale(run_dir: Path, workers: Mapping[str, int]) -> None:
    await asyncio.to_thread(send_to_up, run_dir, Scale({**workers}), lambda text: client.say(f"  {text}"))


def _shown(workers: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {role}" for role, number in workers.items())


def _now() -> str:
    return time.strftime("%H:%M:%S")
