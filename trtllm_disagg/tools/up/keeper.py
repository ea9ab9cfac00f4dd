"""Keeps workers as wanted: looks at them and takes the steps of `reconcile`, repeatedly. Commands change the wish and
wait until it holds. The workers belong to an `up` (`workers.py`), which keeps the wish, or to a fleet
(`admin/fleet.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from trtllm_disagg.admin import commands
from trtllm_disagg.errors import ERROR_PREFIX, DisaggError, InvalidRequestError, StageTimeoutError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.commands import Rollout
from trtllm_disagg.tools.up.look import Described, FirstStages
from trtllm_disagg.tools.up.plan import DeploymentFailedError
from trtllm_disagg.tools.up.reconcile import (
    Adopt,
    Flip,
    Phase,
    Seen,
    Set,
    Start,
    Step,
    Stop,
    Switch,
    Wanted,
    Withdraw,
    WorkerStep,
    reconcile,
    reverted,
    takes_requests,
)

Say = Callable[[str], None]

#: Time between two looks, during a change and otherwise.
_SOON_SECONDS, _IDLE_SECONDS = 0.1, 2.0


@dataclass(eq=False, slots=True)
class Change:
    """What one command changes in the wish, until it holds."""

    before: Wanted
    after: Wanted
    say: Say
    #: False once another command has changed the same.
    stands: Callable[[Wanted], bool]
    #: The reason for a failure.
    error: DisaggError | None = None
    #: Workers started during the change.
    started: set[str] = field(default_factory=set)
    #: Fail when one of those cannot serve.
    needs_all: bool = False
    #: If a worker refuses to flip, start another one.
    may_start: bool = False
    warnings: list[str] = field(default_factory=list)
    #: Unfinished requests of stopped workers.
    given_up: int = 0
    #: Worker -> its changed thresholds, or the reason for none.
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def concerns(self, step: WorkerStep) -> bool:
        if isinstance(step, Switch):
            return self.after.strategy != self.before.strategy
        if isinstance(step, Stop):
            return self.after.following is not None
        return not self.may_start and self.after.roles.get(step.name) != self.before.roles.get(step.name)


class Keeper:
    def __init__(self, wanted: Wanted, first_stages: FirstStages, has_changed: asyncio.Event) -> None:
        """`has_changed`: set when a look may differ from the last one."""
        self.wanted = wanted
        self.seen: tuple[Seen, ...] = ()
        self._has_changed = has_changed
        self._first_stages = first_stages
        #: Worker -> its instance id when it was sent the flip, and the flip.
        self._flipping: dict[str, tuple[str, Flip]] = {}
        #: Worker -> thresholds to set.
        self._lacks: dict[str, dict[str, Any]] = {}
        self._changes: list[Change] = []
        #: Worker -> the command in progress.
        self._in_progress: dict[str, asyncio.Task[None]] = {}
        self._has_looked = asyncio.Event()
        #: Held from a look until its steps are taken.
        self._step_lock = asyncio.Lock()
        self._last_trouble = ""

    # -- what differs between places

    @property
    def model(self) -> str:
        """The model's name for clients."""
        raise NotImplementedError

    async def _look(self) -> Iterable[Seen]:
        raise NotImplementedError

    async def _send(self, one: Seen, command: commands.Command) -> dict[str, Any]:
        raise NotImplementedError

    def require_room(self, starts: Iterable[Start]) -> None:
        """Raises ConfigError if more workers find no GPUs."""

    def prepare(self, command: Rollout, say: Say) -> None:
        """Prepares a new revision's workers. Raises ConfigError for an impossible revision."""

    async def forget_ended(self) -> None:
        """Frees the places of workers that were given up or have left."""

    def _start(self, step: Start) -> None:
        """A fleet's workers are started by another program."""

    async def _stop(self, one: Seen, drain_seconds: float | None) -> None:
        self.note(f"{one.name} finishes its requests and leaves")
        answer = await self._send(one, commands.Leave(drain_seconds or 0.0, self.wanted.in_place))
        for change in self._changes:
            change.given_up += int(answer.get("requests_left") or 0)

    def note(self, text: str) -> None:
        for change in self._changes:
            change.say(text)

    # -- the loop

    async def keep(self) -> None:
        """Never returns."""
        try:
            while True:
                is_idle = await self._look_and_step()
                self._has_looked.set()
                self._has_looked = asyncio.Event()
                # Each look asks each worker.
                soon = _SOON_SECONDS * max(1.0, len(self.seen) / 8)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_SECONDS if is_idle else soon):
                        await self._has_changed.wait()
                self._has_changed.clear()
        finally:
            for task in self._in_progress.values():
                task.cancel()

    async def _look_and_step(self) -> bool:
        """Whether all is as wanted."""
        try:
            async with self._step_lock:
                await self.look()
                steps = reconcile(self.wanted, self.seen)
                for step in steps:
                    self._take(step)
        except Exception as error:  # workers keep serving, and the next look may succeed
            self._note_once(f"cannot look at the workers: {type(error).__name__}: {error}")
            return False
        return not (steps or self._changes) and all(
            each.phase in (Phase.SERVING, Phase.GIVEN_UP) for each in self.seen
        )

    async def look(self) -> None:
        self.seen = tuple(await self._look())
        for each in self.seen:
            self._notice_flip(each)

    async def _described(self, name: str, answer: Described, phase: Phase, fault: str = "") -> Seen:
        """A look at a worker that describes itself."""
        description = answer.description
        is_new = (revision := description.revision or "") == self.wanted.following
        return Seen(
            name,
            description.role.value,
            phase,
            description.strategy,
            revision,
            becomes=description.becomes if phase is Phase.LEAVING else "",
            is_registered=description.registered,
            answers=await self._first_stages.has(answer.instance, description, phase, is_new=is_new),
            requests=description.client_requests,
            fault=fault,
            is_busy=name in self._in_progress,
            lacks=self._lacks.get(name, {}),
            instance=answer.instance,
            description=description,
        )

    def _notice_flip(self, one: Seen) -> None:
        was, step = self._flipping.get(one.name, ("", None))
        if step is None or one.phase is not Phase.SERVING or one.instance in ("", was):
            return
        del self._flipping[one.name]
        if one.role == step.to:
            self.note(f"{one.name} is now a {one.role} worker")
        else:
            why = f"{one.name} could not become {step.to}, and is {one.role} again; see its log"
            self._refused(step, DisaggError(why))

    # -- steps

    def _take(self, step: Step) -> None:
        match step:
            case Start():
                self._start(step)
            case Adopt(revision):
                self._want(replace(self.wanted, revision=revision, following=None, in_place=False))
                self.note(f"revision {revision} serves")
            case Withdraw(revision, why):
                self._want(replace(self.wanted, following=None, in_place=False))
                self.note(f"revision {revision} failed; {self.wanted.revision or 'the old one'} stays")
                for change in self._changes:
                    if change.after.following == revision:
                        change.error = DeploymentFailedError(why)
            case Stop(name) | Flip(name) | Switch(name) | Set(name) if name not in self._in_progress:
                one = next(each for each in self.seen if each.name == name)
                if isinstance(step, Stop):
                    self._forget_role(name)
                task = asyncio.create_task(self._carry_out(step, one), name=f"step for {name}")
                self._in_progress[name] = task
                task.add_done_callback(lambda _: self._end(name))

    def _end(self, name: str) -> None:
        task = self._in_progress.pop(name)
        if not task.cancelled() and (error := task.exception()):
            self.note(f"{ERROR_PREFIX}{task.get_name()}: {type(error).__name__}: {error}")
        self._has_changed.set()

    async def _carry_out(self, step: WorkerStep, one: Seen) -> None:
        try:
            match step:
                case Stop(_, drain_seconds):
                    await self._stop(one, drain_seconds)
                case Set(name, values):
                    await self._set(one, values)
                case Flip(name, to, force):
                    self._flipping[name] = one.instance, step
                    await self._command(step, one, commands.Flip(cast(Any, to), force))
                case Switch(_, to):
                    await self._command(step, one, commands.Switch(to))
                    stage = "first" if takes_requests(one.role, to) else "second"
                    self.note(f"{one.name} is a {stage} stage under {to}")
        except InvalidRequestError as error:
            self._refused(step, error)
        except DisaggError as error:  # for example, it died: the next look shows it
            self.note(f"{one.name}: {error}")

    async def _command(self, step: Flip | Switch, one: Seen, command: commands.Command) -> None:
        answer = await self._send(one, command)
        for warning in map(str, answer.get("warnings") or ()):
            for change in self._concerned(step):
                change.warnings.append(warning)
            self.note(f"warning: {one.name}: {warning}")

    async def _set(self, one: Seen, values: Mapping[str, Any]) -> None:
        outcome: dict[str, Any] = {"worker": one.label, "changed": [], "error": None}
        try:
            answer = await self._send(one, commands.Set({**values}))
            outcome["changed"] = [*map(str, answer.get("changed") or ())]
        except DisaggError as error:
            outcome["error"] = str(error)
        for change in self._changes:
            change.settings[one.name] = outcome
        # Another command may have set more in the meantime.
        self._lacks[one.name] = dict(self._lacks[one.name].items() - values.items())

    def _refused(self, step: WorkerStep, error: DisaggError) -> None:
        """Takes the wish back when a worker cannot do its step."""
        for change in self._concerned(step):
            self.take_back(change, error)
        if isinstance(step, Flip):
            self._flipping.pop(step.name, None)
            self._forget_role(step.name)
        self.note(f"{step.name}: {error}")

    def _forget_role(self, name: str) -> None:
        """Also ends a command that waits for this worker's flip."""
        roles = {each: role for each, role in self.wanted.roles.items() if each != name}
        self._want(replace(self.wanted, roles=roles))

    def _concerned(self, step: WorkerStep) -> list[Change]:
        return [each for each in self._changes if each.error is None and each.concerns(step)]

    # -- wishes

    @asynccontextmanager
    async def fresh_look(self) -> AsyncIterator[None]:
        """Inside the block, in which a command checks and accepts its change, no step is taken."""
        async with self._step_lock:
            await self.look()
            yield

    def accept(self, change: Change) -> None:
        """Makes the change part of the wish. The wish stays after `end`."""
        self._changes.append(change)
        self._want(change.after)

    def end(self, change: Change) -> None:
        self._changes.remove(change)

    async def until(
        self, change: Change, is_so: Callable[[], bool], limit: float | None = None, late: str = ""
    ) -> None:
        """Waits until the change holds. Raises DisaggError if it cannot, or another command changes the same, and
        StageTimeoutError, with the reason `late`, after `limit` seconds.
        """
        over = math.inf if limit is None else time.monotonic() + limit
        while True:
            await self.next_look()
            failed = [
                each for each in self.seen if change.needs_all and each.fault and each.name in change.started
            ]
            if failed:
                self.take_back(change, DeploymentFailedError(failed[0].fault))
                while {each.name for each in failed} & {each.name for each in self.seen}:
                    await self.next_look()
            if change.error is not None:
                raise change.error
            if not change.stands(self.wanted):
                raise DisaggError("another command has changed the same")
            if is_so():
                return
            if time.monotonic() > over:
                raise StageTimeoutError(f"after {limit:g} s {late}")

    def take_back(self, change: Change, error: DisaggError) -> None:
        change.error = error
        self._want(reverted(self.wanted, change.before, change.after))

    async def next_look(self) -> None:
        await self._has_looked.wait()

    def send_settings(self, names: Iterable[str], values: Mapping[str, Any]) -> None:
        """Sends the values to these workers as soon as they accept commands."""
        for name in names:
            self._lacks[name] = {**self._lacks.get(name, {}), **values}

    def _want(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._has_changed.set()

    def _note_once(self, text: str) -> None:
        if text != self._last_trouble:
            self._last_trouble = text
            self.note(text)

    # -- what commands ask

    def of(self, revision: str | None = None) -> list[Seen]:
        """Workers of a revision; None: the current one."""
        revision = self.wanted.revision if revision is None else revision
        return [each for each in self.seen if each.revision == revision]

    def numbers(self) -> dict[str, int]:
        """Role -> number of workers that serve or will serve."""
        alive = (each for each in self.of() if each.lasts and each.phase is not Phase.GIVEN_UP)
        there = Counter(map(self.wanted.role_of, alive))
        return {role: there[role] for role in spec_of(self.wanted.strategy).roles}
