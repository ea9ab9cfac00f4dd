"""Carries out a plan, in the one order in which no request fails: who comes, then who leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from trtllm_disagg.control import Command, Switch, Told
from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.switching.frontend import POLL_SECONDS, Frontend
from trtllm_disagg.switching.plan import SwitchPlan, Worker, plan_switch, worker

Say = Callable[[str], None]


class Workers(Protocol):
    """`runtime.Controller`."""

    async def workers(self) -> Sequence[Told]: ...

    async def tell(self, endpoint_id: str, instance_id: int, command: Command) -> dict[str, Any]: ...


async def switch(workers: Workers, frontend: Frontend, to: str, timeout: float, say: Say) -> str:
    """The line that says what runs now.

    Raises ConfigError before anybody was told anything. A DisaggError later, or the death of this process at any
    point, leaves a deployment that serves: in the old order, the new one, or both; the same call finishes it.
    """
    plan = plan_switch(to, await all_workers(workers))
    if plan.is_done:
        return f"{plan.model} runs {plan.to} already: {_names(plan.first)} first"
    began = time.monotonic()
    for each in plan.first:
        await workers.tell(each.endpoint_id, each.instance_id, Switch(plan.to.value))
        say(f"{each} is a first stage under {plan.to}")
    await _known(plan, frontend, timeout)
    say(f"the frontend sends requests to {_names(plan.first)}")
    for each in plan.second:
        await workers.tell(each.endpoint_id, each.instance_id, Switch(plan.to.value))
        say(f"{each} is a second stage; it finishes its requests")
    left = await _finished(plan, workers, timeout)
    rest = f"; {left} requests still run on the old first stage" if left else ""
    return f"switched {plan.model} to {plan.to} in {time.monotonic() - began:.1f} s{rest}"


async def all_workers(workers: Workers) -> list[Worker]:
    """Raises ConfigError when somebody there is no worker of ours."""
    return [worker(told.endpoint_id, told.instance_id, told.said) for told in await workers.workers()]


async def _known(plan: SwitchPlan, frontend: Frontend, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for each in plan.first:
        while not await frontend.knows(plan.model, each.instance_id):
            if time.monotonic() > deadline:
                raise StageTimeoutError(
                    f"after {timeout:g} s the frontend does not send requests to {each}; the old first stage "
                    "stays beside it; switch again to go on or back"
                )
            await asyncio.sleep(POLL_SECONDS)


async def _finished(plan: SwitchPlan, workers: Workers, timeout: float) -> int:
    """Requests that the old first stage still has after `timeout` seconds. They end there in their own time."""
    deadline = time.monotonic() + timeout
    while left := sum(
        each.is_.whole_requests
        for each in await all_workers(workers)
        if each.is_.role is not plan.to.first_stage_role
    ):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(POLL_SECONDS)
    return left


def _names(workers: Iterable[Worker]) -> str:
    return ", ".join(map(str, workers))
