"""Keeps the workers of an `up` as they are wanted: it looks at them, and takes the steps that `reconcile` says, again
and again. Commands change the wish and wait until it is so; when one is cut, `up` goes on by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from trtllm_disagg.admin import commands
from trtllm_disagg.admin.commands import Leave, Signer
from trtllm_disagg.admin.keys import KEY_FILE, AdminKey
from trtllm_disagg.errors import ConfigError, DisaggError, InvalidRequestError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.look import (
    Described,
    command_worker,
    described,
    frontend_answers,
    frontend_knows,
)
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import (
    NO_WORKERS,
    DeploymentConfig,
    DeploymentFailedError,
    ProcessRole,
    ProcessSpec,
    devices_of,
    queue_env,
    shared_env,
    worker_spec,
)
from trtllm_disagg.tools.up.ports import free_system_ports
from trtllm_disagg.tools.up.reconcile import (
    Adopt,
    Flip,
    Phase,
    Seen,
    Start,
    Step,
    Stop,
    Switch,
    Wanted,
    Withdraw,
    reconcile,
    takes_requests,
)
from trtllm_disagg.tools.up.supervisor import Supervisor

Say = Callable[[str], None]

WANTED_FILE = "wanted.json"
#: Between two looks: while something is under way, and else.
_SOON_SECONDS, _REST_SECONDS = 0.1, 2.0
#: After that a new revision without an answer to the frontend counts as broken.
ANSWER_SECONDS = 60.0
#: For a frontend that does not say which workers it knows.
_SETTLE_SECONDS = 5.0
#: That fail before it counts as broken: one death may be an accident.
_FAILED_STARTS_OF_NEW_REVISION = 2
#: A worker's states (worker/life.py) in which it finishes its requests.
_LEAVING_STATES = ("unlisted", "draining", "over")


@dataclass(eq=False, slots=True)
class Change:
    """What one command changes in the wish, from when it is accepted until it is so."""

    before: Wanted
    after: Wanted
    say: Say
    #: Whether no other command has changed the same since.
    stands: Callable[[Wanted], bool]
    #: Why it cannot be.
    error: DisaggError | None = None
    #: Workers that were started meanwhile.
    started: set[str] = field(default_factory=set)
    #: It fails when one of those cannot serve.
    needs_all: bool = False
    #: Numbers count: where a worker refuses to flip, another one starts.
    may_start: bool = False
    warnings: list[str] = field(default_factory=list)
    #: Requests of workers that were stopped before they had finished them.
    given_up: int = 0

    def concerns(self, step: Flip | Switch) -> bool:
        if isinstance(step, Switch):
            return self.after.strategy != self.before.strategy
        return not self.may_start and self.after.roles.get(step.name) != self.before.roles.get(step.name)


def taken_back(now: Wanted, before: Wanted, after: Wanted) -> Wanted:
    """`now` without what changed from `before` to `after`; what has changed since then stays."""
    single = {
        each.name: getattr(before, each.name)
        for each in fields(Wanted)
        if each.name not in ("workers", "roles", "revision")
        and getattr(before, each.name) != getattr(after, each.name) == getattr(now, each.name)
    }
    workers = {
        role: count + before.workers.get(role, 0) - after.workers.get(role, 0)
        for role, count in now.workers.items()
    }
    flipped = {name for name, role in after.roles.items() if before.roles.get(name) != role}
    roles = {name: role for name, role in now.roles.items() if name not in flipped}
    roles |= {name: before.roles[name] for name in flipped & before.roles.keys()}
    return replace(now, **single, workers=workers, roles=roles)


class Keeper:
    def __init__(self, supervisor: Supervisor) -> None:
        config = supervisor.config
        running = Counter(each.role for each in supervisor.processes)
        self._supervisor = supervisor
        self._signer = Signer(AdminKey.read(config.run_dir / KEY_FILE, "--run-dir"))
        self.wanted = Wanted(
            config.strategy,
            config.revision,
            {role: running[role] for role in spec_of(config.strategy).roles},
        )
        self.seen: tuple[Seen, ...] = ()
        self._descriptions: dict[ManagedProcess, Described] = {}
        #: Instances that the frontend sends requests to, with their revision's being on its way or not.
        self._confirmed: set[tuple[str, bool]] = set()
        #: Instance -> since when the frontend is asked for it, and what it said last.
        self._asked: dict[tuple[str, bool], tuple[float, str]] = {}
        #: Worker -> its instance id when it was told to flip.
        self._flipped_from: dict[str, str] = {}
        self._changes: list[Change] = []
        #: Workers that were started, and have not been ready yet.
        self._coming: set[str] = set()
        #: Worker -> the command to it that is on its way.
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._has_looked = asyncio.Event()
        #: Held from a look until the steps that follow from it are taken.
        self._turn = asyncio.Lock()
        self._last_refusal = ""

    # -- the loop

    async def keep(self) -> None:
        """Never returns."""
        self._write()
        try:
            while True:
                async with self._turn:
                    await self.look()
                    steps = reconcile(self.wanted, self.seen)
                    for step in steps:
                        self._take(step)
                self._has_looked.set()
                self._has_looked = asyncio.Event()
                is_at_rest = not (steps or self._changes) and all(
                    each.phase in (Phase.SERVING, Phase.GIVEN_UP) for each in self.seen
                )
                changed = self._supervisor.has_changed
                with suppress(TimeoutError):
                    async with asyncio.timeout(_REST_SECONDS if is_at_rest else _SOON_SECONDS):
                        await changed.wait()
                changed.clear()
        finally:
            for task in self._under_way.values():
                task.cancel()

    async def look(self) -> None:
        """See what is."""
        workers = [each for each in self._supervisor.processes if each.role not in NO_WORKERS]
        for process in workers:
            if process.has_left:
                self._let_go(process)
        looks = (self._look_at(each) for each in workers if not each.is_over or each.name in self._under_way)
        self.seen = tuple(await asyncio.gather(*looks))
        for each in self.seen:
            if each.phase is Phase.SERVING and each.name in self._coming:
                self._coming.remove(each.name)
                pid = next((known.pid for known in workers if known.name == each.name), 0)
                self._note(f"{each.name} is ready (pid {pid})")

    def _let_go(self, process: ManagedProcess) -> None:
        """One worker fewer is wanted: something else than this `up` has told it to stop."""
        role, wanted = process.role, self.wanted
        if process.told_to_stop.is_set():
            return
        process.told_to_stop.set()
        if process.spec.revision == wanted.revision and wanted.workers.get(role):
            self._want(replace(wanted, workers={**wanted.workers, role: wanted.workers[role] - 1}))

    async def _look_at(self, process: ManagedProcess) -> Seen:
        wanted, revision = self.wanted, process.spec.revision or ""
        is_following = revision == wanted.following
        told = await self._described(process)
        phase = _phase(process, told)
        if told is None:
            role, strategy = process.role, wanted.strategy
            is_registered = answers = phase is Phase.SERVING and takes_requests(role, strategy)
        else:
            role, strategy = told.description.role.value, told.description.strategy
            is_registered = told.description.registered
            answers = False
            if phase is Phase.SERVING and is_registered and takes_requests(role, strategy):
                answers = await self._is_confirmed(told, is_following)
        self._notice_role(process, role, phase, told)
        num_failed = process.deaths.failed_starts
        fault = process.deaths.last if not process.was_ready.is_set() and num_failed else ""
        if is_following:
            fault = fault if num_failed >= _FAILED_STARTS_OF_NEW_REVISION or process.is_given_up else ""
            fault = fault or self._unanswered(process.name, told, phase)
        return Seen(
            process.name,
            process.role,
            phase,
            strategy,
            revision,
            becomes=told.description.becomes if told and phase is Phase.LEAVING else "",
            is_registered=is_registered,
            answers=answers,
            requests=told.description.whole_requests if told else 0,
            fault=fault,
            is_busy=process.name in self._under_way,
        )

    async def _described(self, process: ManagedProcess) -> Described | None:
        """None for a worker that does not describe itself. Between two roles it answers nothing: what it said holds."""
        if process.state not in ("ready", "stopping") or process.spec.system_port is None:
            self._descriptions.pop(process, None)
            return None
        with suppress(OSError):
            if told := await described(process.spec.system_port):
                self._descriptions[process] = told
        return self._descriptions.get(process)

    async def _is_confirmed(self, told: Described, is_following: bool) -> bool:
        """Whether the frontend sends requests to this first stage; of a new revision: whether it has answered one."""
        key, instance = (told.instance, is_following), int(told.instance, 16)
        if key in self._confirmed:
            return True
        url, model = self._supervisor.config.base_url, told.description.model
        since, _ = self._asked.setdefault(key, (time.monotonic(), ""))
        if is_following:
            why = await frontend_answers(url, model, instance)
            is_confirmed = not why
            self._asked[key] = since, why
        else:
            knows = await frontend_knows(url, model, instance)
            is_confirmed = time.monotonic() - since >= _SETTLE_SECONDS if knows is None else knows
        if is_confirmed:
            self._confirmed.add(key)
        return is_confirmed

    def _unanswered(self, name: str, told: Described | None, phase: Phase) -> str:
        since, why = self._asked.get((told.instance, True) if told else ("", True), (0.0, ""))
        if not why or phase is not Phase.SERVING or time.monotonic() - since < ANSWER_SECONDS:
            return ""
        return f"the frontend gets no answer from {name} after {ANSWER_SECONDS:g} s: {why}"

    def _notice_role(
        self, process: ManagedProcess, role: ProcessRole, phase: Phase, told: Described | None
    ) -> None:
        """A worker says its role itself; one that does not run gets the role that is wanted at its next start."""
        if phase in (Phase.WAITING, Phase.GIVEN_UP):
            role = cast(ProcessRole, self.wanted.roles.get(process.name, process.role))
        if role != process.role:
            process.spec = replace(process.spec, role=role)
            self._supervisor.changed(process)
            if phase is Phase.SERVING:
                self._note(f"{process.name} is a {role} worker from now on")
        was = self._flipped_from.get(process.name)
        if told is None or phase is not Phase.SERVING or was in (None, told.instance):
            return
        del self._flipped_from[process.name]
        if role != (to := self.wanted.roles.get(process.name, role)):
            why = f"{process.name} could not become {to}, and is {role} again: its log says why"
            self._refused(Flip(process.name, to), DisaggError(why))

    # -- steps

    def _take(self, step: Step) -> None:
        match step:
            case Start():
                self._start(step)
            case Stop(name) | Flip(name) | Switch(name) if self._find(name) is None:
                pass  # it has gone since the look
            case Stop(name):
                self._begin(name, self._stop(self._process(name), step.drain_seconds))
            case Flip(name):
                self._begin(name, self._command(step, commands.Flip(cast(Any, step.to), step.force)))
            case Switch(name):
                self._begin(name, self._command(step, commands.Switch(step.to)))
            case Adopt(revision):
                old = self._supervisor.config
                self._supervisor.config = self._supervisor.other_configs.pop(revision)
                self._supervisor.other_configs[old.revision] = old
                self._want(replace(self.wanted, revision=revision, following=None, in_place=False))
                self._note(f"revision {revision} serves")
            case Withdraw(revision, why):
                self._want(replace(self.wanted, following=None, in_place=False))
                self._note(
                    f"revision {revision} does not come; {self.wanted.revision or 'the old one'} stays"
                )
                for change in self._changes:
                    if change.after.following == revision:
                        change.error = DeploymentFailedError(why)

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        if name not in self._under_way:
            task = self._under_way[name] = asyncio.create_task(work, name=f"step for {name}")
            task.add_done_callback(lambda _: self._end(name))
        else:
            work.close()

    def _end(self, name: str) -> None:
        task = self._under_way.pop(name)
        if not task.cancelled() and (error := task.exception()):
            self._supervisor.report_error(f"{task.get_name()}: {type(error).__name__}: {error}")
        self._supervisor.has_changed.set()

    def _start(self, step: Start) -> None:
        try:
            (spec,) = self.specs([step])
        except ConfigError as error:  # no GPU is free, for example: it may be at the next look
            if str(error) != self._last_refusal:
                self._last_refusal = str(error)
                self._note(self._last_refusal)
            return
        self._supervisor.add(spec)
        self._coming.add(spec.name)
        for change in self._changes:
            change.started.add(spec.name)
        self._note(f"{spec.name} starts")

    def specs(self, starts: Iterable[Start]) -> list[ProcessSpec]:
        """More workers, on GPUs that no other one uses. Raises ConfigError where there are none."""
        supervisor, specs = self._supervisor, list[ProcessSpec]()
        for step in starts:
            config, role = supervisor.config_of(step.revision), cast(ProcessRole, step.role)
            env = shared_env(config, supervisor.environ)
            env |= queue_env(process.spec for process in supervisor.processes)
            holding = (process.spec for process in supervisor.processes if process.holds_gpus)
            env |= config.gpus.environment(role, devices_of([*holding, *specs]))
            index = self._next_index(role) + sum(each.first_role == role for each in specs)
            (port,) = free_system_ports(1)
            specs.append(worker_spec(config, role, index, env, port))
        return specs

    def _next_index(self, role: ProcessRole) -> int:
        """The first index without a log: names are never used twice, so that no log is overwritten."""
        names = [path.stem for path in self._supervisor.config.run_dir.glob(f"{role}-*.log")]
        names += [each.name for each in self._supervisor.processes]
        parts = (name.rpartition("-") for name in names)
        return (
            max((int(number) for of, _, number in parts if of == role and number.isdigit()), default=-1) + 1
        )

    async def _stop(self, process: ManagedProcess, drain_seconds: float | None) -> None:
        self._note(f"{process.name} finishes its requests and leaves")
        told, seconds = self._descriptions.get(process), None
        if drain_seconds is not None and told is not None and process.spec.system_port is not None:
            process.leaves()
            self._supervisor.changed(process)
            seconds = drain_seconds + max(self._supervisor.config.beyond_drain_seconds, 0.0)
            with suppress(DisaggError):  # it ends as it answers, or before
                answer = await command_worker(
                    process.spec.system_port, told.instance, self._signer, Leave(drain_seconds)
                )
                for change in self._changes:
                    change.given_up += int(answer.get("requests_left") or 0)
        await self._supervisor.remove(process, seconds)
        end = "" if process.ended_well else f" ({process.describe_end()})"
        self._note(f"{process.name} has left{end}")

    async def _command(self, step: Flip | Switch, command: commands.Flip | commands.Switch) -> None:
        process = self._process(step.name)
        if (told := self._descriptions.get(process)) is None or process.spec.system_port is None:
            self._refused(step, DisaggError(f"{step.name} takes no commands: it does not describe itself"))
            return
        if isinstance(step, Flip):
            self._flipped_from[step.name] = told.instance
        try:
            answer = await command_worker(process.spec.system_port, told.instance, self._signer, command)
        except InvalidRequestError as error:
            self._flipped_from.pop(step.name, None)
            self._refused(step, error)
        except DisaggError as error:  # it has died, for example: the next look tells
            self._note(f"{step.name}: {error}")
        else:
            for warning in map(str, answer.get("warnings") or ()):
                for change in self._concerned(step):
                    change.warnings.append(warning)
                self._note(f"warning: {step.name}: {warning}")
            if isinstance(step, Switch):
                stage = "first" if takes_requests(process.role, step.to) else "second"
                self._note(f"{step.name} is a {stage} stage under {step.to}")

    def _refused(self, step: Flip | Switch, error: DisaggError) -> None:
        """A worker can't do what is wanted: the wish is taken back."""
        concerned = self._concerned(step)
        for change in concerned:
            change.error = error
            self._want(taken_back(self.wanted, change.before, change.after))
        if isinstance(step, Flip) and step.name in self.wanted.roles:
            roles = {name: role for name, role in self.wanted.roles.items() if name != step.name}
            self._want(replace(self.wanted, roles=roles))
        self._note(f"{step.name}: {error}")

    def _concerned(self, step: Flip | Switch) -> list[Change]:
        return [each for each in self._changes if each.error is None and each.concerns(step)]

    # -- wishes

    @asynccontextmanager
    async def fresh_look(self) -> AsyncIterator[None]:
        """Inside the block, where a command checks what it wants and says so, no step is taken."""
        async with self._turn:
            await self.look()
            yield

    def accept(self, change: Change) -> None:
        """The command that wants this waits from now on (`until`), until `end`. Its wish stays after that."""
        self._changes.append(change)
        self._want(change.after)

    def end(self, change: Change) -> None:
        self._changes.remove(change)

    async def until(self, change: Change, is_so: Callable[[], bool]) -> None:
        """Raises the DisaggError by which the change cannot be, also where another command wants something else."""
        while True:
            await self.next_look()
            failed = [
                each for each in self.seen if change.needs_all and each.fault and each.name in change.started
            ]
            if failed:
                self.take_back(change, DeploymentFailedError(failed[0].fault))
                await self.until_gone(each.name for each in failed)
            if change.error is not None:
                raise change.error
            if not change.stands(self.wanted):
                raise DisaggError("another command has changed the same meanwhile")
            if is_so():
                return

    def take_back(self, change: Change, error: DisaggError) -> None:
        change.error = error
        self._want(taken_back(self.wanted, change.before, change.after))

    async def next_look(self) -> None:
        await self._has_looked.wait()

    async def until_gone(self, names: Iterable[str]) -> None:
        gone = {*names}
        while gone & {each.name for each in self._supervisor.processes}:
            await self.next_look()

    async def forget_ended(self) -> None:
        """Workers that were given up, or have left, have no place any more: new ones may take it."""
        for process in [*self._supervisor.processes]:
            if process.role not in NO_WORKERS and (process.is_given_up or process.has_left):
                await self._supervisor.forget(process)

    def _want(self, wanted: Wanted) -> None:
        supervisor = self._supervisor
        if wanted.strategy != supervisor.config.strategy:
            supervisor.config = replace(supervisor.config, strategy=wanted.strategy)
            for revision, config in supervisor.other_configs.items():
                supervisor.other_configs[revision] = replace(config, strategy=wanted.strategy)
        self.wanted = wanted
        self._write()
        supervisor.has_changed.set()

    def _write(self) -> None:
        file: Path = self._supervisor.config.run_dir / WANTED_FILE
        with suppress(OSError):  # a full disk is no reason to stop serving
            draft = file.with_suffix(".json.new")
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(self.wanted), indent=1) + b"\n")
            draft.replace(file)

    def _note(self, text: str) -> None:
        self._supervisor.note(text)
        for change in self._changes:
            change.say(text)

    def _find(self, name: str) -> ManagedProcess | None:
        return next((each for each in self._supervisor.processes if each.name == name), None)

    def _process(self, name: str) -> ManagedProcess:
        process = self._find(name)
        assert process is not None, name
        return process

    # -- what commands ask

    def described_as(self, name: str) -> Described | None:
        process = self._find(name)
        return None if process is None else self._descriptions.get(process)

    def of(self, revision: str | None = None) -> list[Seen]:
        """The workers of a revision; None: of the current one."""
        return [
            each
            for each in self.seen
            if each.revision == (self.wanted.revision if revision is None else revision)
        ]

    def numbers(self) -> dict[str, int]:
        """How many of each role serve or will serve."""
        alive = (each for each in self.of() if each.lasts and each.phase is not Phase.GIVEN_UP)
        there = Counter(map(self.wanted.role_of, alive))
        return {role: there[role] for role in spec_of(self.wanted.strategy).roles}

    @property
    def config(self) -> DeploymentConfig:
        return self._supervisor.config


def _phase(process: ManagedProcess, told: Described | None) -> Phase:
    match process.state:
        case "planned" | "starting":
            return Phase.STARTING
        case "exited" if process.is_given_up:
            return Phase.GIVEN_UP
        case "exited" if process.told_to_stop.is_set():
            return Phase.LEAVING
        case "restarting" | "exited":
            return Phase.WAITING
        case "stopping":
            return Phase.LEAVING
    if told is None:
        return Phase.SERVING
    if told.description.becomes or told.description.state in _LEAVING_STATES:
        return Phase.LEAVING
    return Phase.SERVING if told.description.ready else Phase.STARTING
