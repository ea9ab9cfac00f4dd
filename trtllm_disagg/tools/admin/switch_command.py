"""`trtllm-disagg switch`: changes the strategy of a deployment while it serves, without a failed request.

`plan_switch` decides the new stage of each worker. `switch` executes the plan in the one order in which no request
fails: the new first stage registers, the frontend learns of it, then the old first stage leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from trtllm_disagg.admin.commands import Switch
from trtllm_disagg.config.settings import not_negative
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError, DisaggError, PeerUnavailableError, StageTimeoutError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.strategies import require_switchable, spec_of, switchable
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.client import Up, Worker, Workers, all_workers
from trtllm_disagg.tools.up.http import ask


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """All workers in `first` become the first stage, then all in `second` the second. A worker that already has its
    stage does not change, so a plan that was only partly executed is completed by planning and executing again.
    """

    to: str
    model: str
    first: tuple[Worker, ...]
    second: tuple[Worker, ...]

    @property
    def is_done(self) -> bool:
        return all(w.is_.strategy == self.to and w.is_.registered for w in self.first) and all(
            w.is_.strategy == self.to and not w.is_.registered for w in self.second
        )


def plan_switch(to: str, workers: Sequence[Worker]) -> SwitchPlan:
    """Raises ConfigError, which names what is allowed, when these workers cannot run the strategy `to`."""
    require_switchable(to)
    roles = Counter(w.is_.role for w in workers)
    there = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
    missing = [role for role in (Role.PREFILL, Role.DECODE) if not roles[role]]
    if missing:
        raise ConfigError(
            f"there is no {' and no '.join(missing)} worker, and --to {to} needs both roles (there are: {there}); "
            "switch when one is ready at the usual endpoint of the namespace, not at one of its own by --endpoint or "
            "--next-endpoint"
        )
    fixed = {w.is_.strategy for w in workers if w.is_.role is not Role.AGG} - set(switchable())
    if fixed or roles[Role.AGG]:
        raise ConfigError.bad_value(
            "--to",
            to,
            f"no switch of a deployment of {there} under {', '.join(fixed) or 'agg'}: its frontend treats them "
            "otherwise; start another deployment",
        )
    for each in workers:
        if each.is_.fixed_by:
            raise ConfigError.bad_value(
                "--to",
                to,
                f"no switch: {each} was started with {' and '.join(each.is_.fixed_by)}; only workers at the usual "
                "endpoints can be switched",
            )
    models = sorted({w.is_.model for w in workers})
    if len(models) > 1:
        raise ConfigError.bad_value(
            "--namespace", ", ".join(models), "the namespace of one model; there are several in this one"
        )
    first = tuple(w for w in workers if w.is_.role == spec_of(to).entry_role)
    return SwitchPlan(to, models[0], first, tuple(w for w in workers if w not in first))


POLL_SECONDS = 0.05
_TIMEOUT_SECONDS = 5.0

#: A model may be served at one of the two paths only.
_ASKED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "?"},
    "chat/completions": {"messages": [{"role": "user", "content": "?"}]},
}

#: Whether the frontend sends requests for a model to the worker with that instance id.
Knows = Callable[[str, int], Awaitable[bool]]


def as_frontend_says(url: str) -> Knows:
    """The query pins the worker and generates no token: the frontend answers only where it would send the request, and
    refuses a pin to a worker that it does not know.
    """

    async def knows(model: str, instance_id: int) -> bool:
        nvext = {"annotations": ["query_instance_id:"], "extra_fields": ["worker_id"]}
        pinned = {"x-dynamo-worker-instance-id": str(instance_id)}
        for path, prompt in _ASKED.items():
            body = {"model": model, "max_tokens": 1, "nvext": nvext, **prompt}
            try:
                _, answer = await ask(f"{url}/v1/{path}", _TIMEOUT_SECONDS, body, pinned)
                if json.loads(answer)["nvext"]["worker_id"]["decode_worker_id"] == instance_id:
                    return True
            except (OSError, ValueError, KeyError, TypeError):
                pass  # not served there, or not by this worker
        return False

    return knows


def as_assumed_after(seconds: float) -> Knows:
    """For frontends with unknown addresses: they count as knowing a worker `seconds` after the first query."""
    asked_at: float | None = None

    async def knows(model: str, instance_id: int) -> bool:
        nonlocal asked_at
        now = time.monotonic()
        asked_at = asked_at or now
        return now - asked_at >= seconds

    return knows


def knows_by(args: argparse.Namespace, up: Up) -> Knows:
    """By the flags of `add_frontend`."""
    url = up.url or args.frontend
    return as_frontend_says(url.rstrip("/")) if url else as_assumed_after(args.settle)


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Switched:
    """The outcome of a switch."""

    model: str
    strategy: str
    #: The workers of the first stage.
    first: tuple[str, ...]
    #: Duration of the switch; None when the deployment ran this strategy already.
    seconds: float | None = None
    #: Requests that still run on the old first stage.
    requests_left: int = 0

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.model} runs {self.strategy} already: {', '.join(self.first)} first"
        left = self.requests_left
        rest = f"; {left} requests still run on the old first stage" if left else ""
        return f"switched {self.model} to {self.strategy} in {self.seconds:.1f} s{rest}"


#: Workers may have started during a round, or entered discovery anew: they need another one.
_MOST_ROUNDS = 3


async def switch(
    workers: Workers,
    knows: Knows,
    to: str,
    timeout: float,
    say: Say,
    change_new_workers: Callable[[], None] = lambda: None,
) -> Switched:
    """`change_new_workers` is called when all workers have been switched, before their requests have ended: workers
    that start later have to run `to`.

    Raises ConfigError before any worker is changed. After a later DisaggError, or the death of this process at any
    point, the deployment still serves, in the old order, the new one, or both; the same call completes the switch.
    """
    plan = plan_switch(to, await all_workers(workers))
    ran_already = plan.is_done
    began = time.monotonic()
    for rounds_left in reversed(range(_MOST_ROUNDS)):
        was_cut_short = False
        try:
            if not plan.is_done:
                await _execute(plan, workers, knows, timeout, say)
            change_new_workers()
        except PeerUnavailableError as error:
            if not rounds_left:
                raise
            was_cut_short = True
            say(f"{error}; looking at the workers again")
        # Workers that started meanwhile may have compared themselves with workers not yet switched.
        try:
            plan = plan_switch(to, await all_workers(workers))
        except ConfigError as error:
            raise DisaggError(f"workers were switched to {to}, but changed meanwhile: {error}") from None
        if plan.is_done and not was_cut_short:
            break
    else:
        others = _names(w for w in plan.first + plan.second if w.is_.strategy != to)
        raise DisaggError(
            f"{others or 'workers'} changed back meanwhile: another command changes this deployment; switch again when "
            "it is done"
        )
    outcome = Switched(plan.model, plan.to, tuple(map(str, plan.first)))
    if ran_already:
        return outcome
    remaining = await _until_finished(plan, workers, timeout)
    return replace(outcome, seconds=time.monotonic() - began, requests_left=remaining)


async def _execute(plan: SwitchPlan, workers: Workers, knows: Knows, timeout: float, say: Say) -> None:
    for each in plan.first:
        await workers.send(each.endpoint_id, each.instance_id, Switch(plan.to))
        say(f"{each} is a first stage under {plan.to}")
    await until_known(workers, plan.first, knows, timeout)
    say(f"the frontend sends requests to {_names(plan.first)}")
    for each in plan.second:
        await workers.send(each.endpoint_id, each.instance_id, Switch(plan.to))
        say(f"{each} is a second stage; it finishes its requests")


async def until_known(workers: Workers, first: Iterable[Worker], knows: Knows, timeout: float) -> None:
    """Raises StageTimeoutError, and PeerUnavailableError for a worker that has left discovery."""
    deadline = time.monotonic() + timeout
    for each in first:
        while not await knows(each.is_.model, each.instance_id):
            if each.instance_id not in {worker.instance_id for worker in await workers.workers()}:
                raise PeerUnavailableError(f"{each} has left discovery")
            if time.monotonic() > deadline:
                raise StageTimeoutError(
                    f"after {timeout:g} s the frontend does not send requests to {each}; the old first stage "
                    "stays beside it; give the command again to go on, or the opposite one to go back"
                )
            await asyncio.sleep(POLL_SECONDS)


async def _until_finished(plan: SwitchPlan, workers: Workers, timeout: float) -> int:
    """Wait until the old first stage has no requests. Returns how many still run there after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        old = (each for each in await all_workers(workers) if each.is_.role != spec_of(plan.to).entry_role)
        if not (remaining := sum(each.is_.whole_requests for each in old)) or time.monotonic() > deadline:
            return remaining
        await asyncio.sleep(POLL_SECONDS)


def _names(workers: Iterable[Worker]) -> str:
    return ", ".join(map(str, workers))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # Not `choices`: `require_switchable` explains a refusal.
    add(
        "--to",
        required=True,
        metavar="{" + ",".join(switchable()) + "}",
        help="the strategy to run from now on",
    )
    client.add_arguments(parser)
    add_frontend(parser)
    add(
        "--timeout",
        type=not_negative,
        default=60.0,
        metavar="SECONDS",
        help="for each step (default: %(default)g)",
    )
    client.add_json(parser)


def add_frontend(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--frontend",
        metavar="URL",
        help="without --run-dir: a frontend to ask when it knows the new first stage",
    )
    add(
        "--settle",
        type=not_negative,
        default=5.0,
        metavar="SECONDS",
        help="without a frontend to ask: time for all frontends to see the new first stage (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Returns 0 when switched; raises a DisaggError (1) for a failure midway, ConfigError (2) for a wrong setting."""
    require_switchable(args.to)

    async def change(workers: Workers, up: Up) -> ExitCode:
        tell_up = partial(up.change_new_workers, Switch(args.to))
        outcome = await switch(workers, knows_by(args, up), args.to, args.timeout, client.say, tell_up)
        print(json.dumps(asdict(outcome)) if args.json else outcome)
        return ExitCode.DONE

    return client.change_deployment(args, change)
