"""Workers that no `up` on this machine has started: a command looks at them by Dynamo's discovery, and takes the steps
of `reconcile` itself. It starts no worker, and the wish ends with the command: the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from trtllm_disagg.admin.commands import Flip, Leave, Switch
from trtllm_disagg.config.settings import not_negative
from trtllm_disagg.errors import ConfigError, PeerUnavailableError, StageTimeoutError
from trtllm_disagg.tools.admin.client import Say, Worker, Workers, all_workers
from trtllm_disagg.tools.up import reconcile as steps
from trtllm_disagg.tools.up.look import (
    FirstStages,
    WhyNot,
    as_assumed_after,
    as_frontend_says,
    phase_of,
    seen,
)
from trtllm_disagg.tools.up.reconcile import Phase, Seen, Wanted, reconcile, takes_requests

POLL_SECONDS = 0.05


def knows_by(args: argparse.Namespace) -> WhyNot:
    """By the flags of `add_frontend`."""
    url: str | None = args.frontend
    return as_frontend_says(url.rstrip("/"), args.settle) if url else as_assumed_after(args.settle)


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


@dataclass
class Fleet:
    workers: Workers
    first_stages: FirstStages
    say: Say
    there: list[Worker] = field(default_factory=list)
    #: Worker -> the command to it that is on its way.
    _under_way: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    #: Requests of workers that left before they had finished them.
    given_up: int = 0
    #: Of the last flip.
    warnings: list[str] = field(default_factory=list)

    async def look(self, wanted: Wanted) -> list[Seen]:
        self.there = await all_workers(self.workers)
        return [await self._seen(each, wanted) for each in self.there]

    async def _seen(self, each: Worker, wanted: Wanted) -> Seen:
        told, under_way = each.description, self._under_way.get(str(each))
        phase = phase_of(told)
        if under_way is not None and under_way.get_name() == steps.Stop.__name__:
            phase = Phase.LEAVING
        is_new = wanted.following is not None and told.revision == wanted.following
        answers = await self.first_stages.has(f"{each.instance_id:x}", told, phase, is_new=is_new)
        return seen(str(each), told, phase, answers=answers, is_busy=under_way is not None)

    async def reach(
        self, wanted: Wanted, is_so: Callable[[Wanted, Sequence[Seen]], bool], timeout: float, late: str
    ) -> Wanted:
        """Take steps until it is so; returns the wish as it is then. Raises StageTimeoutError, with what is `late`,
        after `timeout` seconds, and the DisaggError of a worker that refuses.
        """
        deadline = time.monotonic() + timeout
        try:
            while True:
                seen = await self.look(wanted)
                if is_so(wanted, seen):
                    return wanted
                for step in reconcile(wanted, seen):
                    if isinstance(step, steps.Adopt):
                        wanted = replace(wanted, revision=step.revision, following=None)
                        self.say(f"revision {step.revision} serves")
                        deadline = float("inf")  # that of the drains follows
                    elif isinstance(step, steps.Stop | steps.Flip | steps.Switch):
                        self._begin(step)
                if time.monotonic() > deadline:
                    raise StageTimeoutError(f"after {timeout:g} s {late}")
                await self._pause()
        finally:
            for task in self._under_way.values():
                task.cancel()
            await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def _begin(self, step: steps.Stop | steps.Flip | steps.Switch) -> None:
        if step.name not in self._under_way:
            one = next(each for each in self.there if str(each) == step.name)
            self._under_way[step.name] = asyncio.create_task(self._take(step, one), name=type(step).__name__)

    async def _pause(self) -> None:
        """Until a step is done, or for a moment. Raises the DisaggError of a step."""
        if not self._under_way:
            await asyncio.sleep(POLL_SECONDS)
            return
        await asyncio.wait(
            self._under_way.values(), timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        for name in [name for name, task in self._under_way.items() if task.done()]:
            self._under_way.pop(name).result()

    async def _take(self, step: steps.Stop | steps.Flip | steps.Switch, one: Worker) -> None:
        try:
            match step:
                case steps.Stop(_, seconds):
                    self.say(f"{one} finishes its requests and leaves")
                    answer = await self.workers.send(one.endpoint_id, one.instance_id, Leave(seconds or 0.0))
                    self.given_up += int(answer["requests_left"])
                case steps.Flip(_, to, force):
                    flip = Flip("prefill" if to == "prefill" else "decode", force)
                    answer = await self.workers.send(one.endpoint_id, one.instance_id, flip)
                    self.warnings = [*map(str, answer.get("warnings") or ())]
                    for warning in self.warnings:
                        self.say(f"warning: {warning}")
                case steps.Switch(_, to):
                    await self.workers.send(one.endpoint_id, one.instance_id, Switch(to))
                    stage = "first" if takes_requests(one.description.role, to) else "second"
                    self.say(f"{one} is a {stage} stage under {to}")
        except PeerUnavailableError as error:  # it left before it answered, or died: the next look tells
            self.say(f"{one}: {error}")


def require_key(there: Iterable[Worker], key: str) -> None:
    """Raises ConfigError, before any worker is changed, for workers that would refuse this key."""
    others = [f"{each} ({each.description.key})" for each in there if each.description.key not in (None, key)]
    if others:
        allowed = f"the one key of all workers; these have another one: {', '.join(others)}"
        raise ConfigError.bad_value("--key-file", key, allowed)
