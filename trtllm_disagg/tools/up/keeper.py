"""Keeps the workers of an `up` as they are wanted: it looks at them, and takes the steps that `reconcile` says, again
and again. Commands change the wish and wait until it is so; when one is cut, `up` goes on by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
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
    FirstStages,
    as_frontend_says,
    command_worker,
    described,
    phase_of,
    seen,
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
    taken_back,
    takes_requests,
)
from trtllm_disagg.tools.up.supervisor import Supervisor

Say = Callable[[str], None]

WANTED_FILE = "wanted.json"
#: Between two looks: while something is under way, and else.
_SOON_SECONDS, _REST_SECONDS = 0.1, 2.0
#: For a frontend that does not say which workers it knows.
_SETTLE_SECONDS = 5.0
#: That fail before it counts as broken: one death may be an accident.
_FAILED_STARTS_OF_NEW_REVISION = 2


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
        self._first_stages = FirstStages(as_frontend_says(config.base_url, _SETTLE_SECONDS))
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
        self._last_trouble = ""

    # -- the loop

    async def keep(self) -> None:
        """Never returns."""
        self._write()
        try:
            while True:
                is_at_rest = await self._look_and_step()
                self._has_looked.set()
                self._has_looked = asyncio.Event()
                # Each look asks each worker.
                soon = _SOON_SECONDS * max(1.0, len(self.seen) / 8)
                changed = self._supervisor.has_changed
                with suppress(TimeoutError):
                    async with asyncio.timeout(_REST_SECONDS if is_at_rest else soon):
                        await changed.wait()
                changed.clear()
        finally:
            for task in self._under_way.values():
                task.cancel()

    async def _look_and_step(self) -> bool:
        """Whether all is as wanted."""
        try:
            async with self._turn:
                await self.look()
                steps = reconcile(self.wanted, self.seen)
                for step in steps:
                    self._take(step)
        except Exception as error:  # the workers serve on, and the next look may be better
            self._note_once(f"the workers cannot be looked at: {type(error).__name__}: {error}")
            return False
        return not (steps or self._changes) and all(
            each.phase in (Phase.SERVING, Phase.GIVEN_UP) for each in self.seen
        )

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
        is_new, is_busy = revision == wanted.following, process.name in self._under_way
        told = await self._described(process)
        phase = _phase(process, told)
        self._notice_role(process, told, phase)
        fault = self._fault(process, is_new=is_new)
        if told is None:  # of another version: it counts by its process
            is_first = phase is Phase.SERVING and takes_requests(process.role, wanted.strategy)
            return Seen(
                process.name,
                process.role,
                phase,
                wanted.strategy,
                revision,
                is_registered=is_first,
                answers=is_first,
                fault=fault,
                is_busy=is_busy,
            )
        answers = await self._first_stages.has(told.instance, told.description, phase, is_new=is_new)
        if is_new and not fault and (why := self._first_stages.fault(told.instance)):
            fault = f"{process.name}: {why}"
        found = seen(process.name, told.description, phase, answers=answers, is_busy=is_busy, fault=fault)
        # It ends, whatever role it was about to get.
        return replace(found, becomes="") if process.told_to_stop.is_set() else found

    async def _described(self, process: ManagedProcess) -> Described | None:
        """None for a worker that does not describe itself. Between two roles it answers nothing: what it said holds."""
        if process.state not in ("ready", "stopping") or process.spec.system_port is None:
            self._descriptions.pop(process, None)
            return None
        with suppress(OSError):
            if told := await described(process.spec.system_port):
                self._descriptions[process] = told
        return self._descriptions.get(process)

    def _fault(self, process: ManagedProcess, *, is_new: bool) -> str:
        """Why a worker that was never ready cannot be: one death may be an accident, unless a command waits for it."""
        num_failed = process.deaths.failed_starts
        is_broken = process.is_given_up or num_failed >= (_FAILED_STARTS_OF_NEW_REVISION if is_new else 1)
        return process.deaths.last if is_broken and not process.was_ready.is_set() else ""

    def _notice_role(self, process: ManagedProcess, told: Described | None, phase: Phase) -> None:
        """A worker says its role itself; one that does not run gets the role that is wanted at its next start."""
        role: ProcessRole = told.description.role.value if told else process.role
        if phase in (Phase.WAITING, Phase.GIVEN_UP):
            role = cast(ProcessRole, self.wanted.roles.get(process.name, role))
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
            self._note_once(str(error))
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

    def _note_once(self, text: str) -> None:
        if text != self._last_trouble:
            self._last_trouble = text
            self._note(text)

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
    return Phase.SERVING if told is None else phase_of(told.description)
