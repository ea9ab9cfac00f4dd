"""The workers of an `up`: the checks before they start, and how `up` looks at, starts and stops them.

A worker would fail the same checks seconds later, while the frontend keeps trying to serve its model.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from trtllm_disagg.admin.commands import Command, Signer
from trtllm_disagg.admin.keys import KEY_FILE, AdminKey
from trtllm_disagg.common import machine
from trtllm_disagg.config.args import parse_worker_flags
from trtllm_disagg.config.worker_config import WorkerConfig, check_value, flag_of
from trtllm_disagg.engine.table import resolve_engine
from trtllm_disagg.errors import ConfigError, DisaggError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.commands import Rollout
from trtllm_disagg.tools.up.gpus import gpus_of, longest_sequence, worker_configs
from trtllm_disagg.tools.up.keeper import Keeper, Say
from trtllm_disagg.tools.up.look import Described, FirstStages, command_worker, described, phase_of
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import (
    NO_WORKERS,
    DeploymentConfig,
    ProcessRole,
    ProcessSpec,
    devices_of,
    queue_env,
    shared_env,
    worker_arguments,
    worker_spec,
    worker_total,
)
from trtllm_disagg.tools.up.ports import free_system_ports, give_back
from trtllm_disagg.tools.up.reconcile import Phase, Seen, Start, Wanted, takes_requests
from trtllm_disagg.tools.up.run_dir import replace_json, unlist
from trtllm_disagg.tools.up.supervisor import Supervisor

WANTED_FILE = "wanted.json"
#: For a frontend that does not report the workers it knows.
_SETTLE_SECONDS = 5.0
#: Max failed starts, since one may be an accident.
_FAILED_STARTS_OF_NEW_REVISION = 2


def parsed_workers(config: DeploymentConfig, environ: Mapping[str, str]) -> list[WorkerConfig]:
    """One worker's configuration per role. Raises ConfigError for wrong flags and variables."""
    environ = {**environ, **shared_env(config, environ)}
    workers = [parse_worker_flags(arguments, environ) for arguments in worker_arguments(config).values()]
    if any(worker.served_model_name != config.served_model_name for worker in workers):
        raise ConfigError("--worker-args: --served-model-name is a flag of `up` itself")
    return workers


def check_workers(config: DeploymentConfig, environ: Mapping[str, str]) -> None:
    """Raises ConfigError for flags, engine arguments or a model that no worker could serve."""
    from trtllm_disagg.config.engine_args import build_engine_args

    for worker in parsed_workers(config, environ):
        build_engine_args(replace(worker, engine=resolve_engine(worker.engine)))
        if "chat" in worker.endpoint_types and worker.custom_jinja_template is None:
            _require_chat_template(Path(config.model))


def _require_chat_template(model: Path) -> None:
    """Without one, Dynamo's frontend would retry forever to serve chats. DeepSeek's models have theirs in Dynamo's
    code.
    """
    config, file = model / "config.json", model / "tokenizer_config.json"
    text = "".join(each.read_text(encoding="utf-8") for each in (config, file) if each.is_file())
    has_one = any((model / f"chat_template.{suffix}").exists() for suffix in ("jinja", "json"))
    if text and not has_one and not re.search('"(chat_template|deepseek)', text):
        instead = "--worker-args '--custom-jinja-template FILE', or '--endpoint-types completions'"
        raise ConfigError(f"--model: {file} has no chat_template, which chats need; add it or {instead}")


def lacking_parsers(worker: WorkerConfig, model: str | None) -> list[str]:
    """Parser flags that the model's chat template needs and the worker lacks; empty if the model is not here."""
    directory = Path(os.path.expanduser(model or "/none"))
    files = [*directory.glob("chat_template.*"), directory / "tokenizer_config.json"]
    text = "".join(file.read_text(errors="replace") for file in files if file.is_file())
    wanted = {"tool_call_parser": "tool", "reasoning_parser": "think"}
    return [flag_of(name) for name, mark in wanted.items() if mark in text and not getattr(worker, name)]


def with_workers(config: DeploymentConfig, environ: Mapping[str, str]) -> DeploymentConfig:
    """Adds what follows from the workers' arguments. Raises ConfigError for wrong ones."""
    workers = dict(worker_configs(worker_arguments(config), environ))
    for worker in workers.values():
        worker.engine_spec.require_installed()
    return replace(
        config,
        max_seq_len=longest_sequence(workers.values()),
        images=config.images or any(worker.images for worker in workers.values()),
        longest_drain=max((worker.drain_seconds for worker in workers.values()), default=None),
        gpus=gpus_of(workers, config.gpu_devices, environ),
    )


def needs_of(config: DeploymentConfig) -> machine.Needs:
    spec = spec_of(config.strategy)
    workers = worker_total(config) if spec.is_disaggregated else 0
    routers = sum(config.workers[role] for role in spec.kv_routed_roles) if config.next_router == "kv" else 0
    inotify = machine.INOTIFY_PER_WORKER * workers + machine.INOTIFY_PER_KV_ROUTER * routers
    return machine.Needs(machine.INOTIFY_PER_FRONTEND + inotify, moves_kv=spec.is_disaggregated)


class UpKeeper(Keeper):
    """Keeps the workers that a supervisor runs, and writes the wish to the run directory."""

    def __init__(self, supervisor: Supervisor) -> None:
        config, running = supervisor.config, [each.role for each in supervisor.processes]
        numbers: dict[str, int] = {role: running.count(role) for role in spec_of(config.strategy).roles}
        wanted = Wanted(config.strategy, config.revision, numbers, thresholds=config.thresholds)
        super().__init__(wanted, FirstStages(config.base_url, _SETTLE_SECONDS), supervisor.has_changed)
        self._supervisor = supervisor
        self._signer = Signer(AdminKey.read(config.run_dir / KEY_FILE, "--run-dir"))
        self._descriptions: dict[ManagedProcess, Described] = {}
        #: Started workers that have not been ready yet.
        self._coming: set[str] = set()
        self._want(wanted)

    @property
    def model(self) -> str:
        return self._supervisor.config.served_model_name

    def note(self, text: str) -> None:
        self._supervisor.note(text)
        super().note(text)

    # -- the look

    async def _look(self) -> list[Seen]:
        workers = [each for each in self._supervisor.processes if each.role not in NO_WORKERS]
        for process in workers:
            if process.has_left:
                self._let_go(process)
        there = [each for each in workers if not each.is_over or each.name in self._in_progress]
        seen = await asyncio.gather(*map(self._look_at, there))
        for process, each in zip(there, seen, strict=True):
            if each.phase is Phase.SERVING and each.name in self._coming:
                self._coming.remove(each.name)
                self.note(f"{each.name} is ready (pid {process.pid})")
        return seen

    def _let_go(self, process: ManagedProcess) -> None:
        """Another program stopped it, so one worker fewer is wanted."""
        if process.stop_requested.is_set():
            return
        process.stop_requested.set()
        role = self.wanted.roles.get(process.name, process.role)  # it may have died amid a flip
        self._forget_role(process.name)
        wanted = self.wanted
        if process.spec.revision == wanted.revision and wanted.workers.get(role):
            self._want(replace(wanted, workers={**wanted.workers, role: wanted.workers[role] - 1}))

    async def _look_at(self, process: ManagedProcess) -> Seen:
        name, revision, strategy = process.name, process.spec.revision or "", self.wanted.strategy
        is_new = revision == self.wanted.following
        answer = await self._described_by(process)
        phase = _phase(process, answer)
        self._notice_role(process, answer, phase)
        fault = self._fault(process, is_new=is_new)
        if answer is None:  # another version: judge it by its process
            is_first = phase is Phase.SERVING and takes_requests(process.role, strategy)
            seen = Seen(
                name, process.role, phase, strategy, revision, fault=fault, lacks=self._lacks.get(name, {})
            )
            return replace(seen, is_registered=is_first, answers=is_first, is_busy=name in self._in_progress)
        seen = await self._described(name, answer, phase, fault)
        if is_new and not fault and (why := self._first_stages.fault(answer.instance)):
            seen = replace(seen, fault=f"{name}: {why}")
        # A stopped one ends, whatever role it was about to get.
        return replace(seen, becomes="") if process.stop_requested.is_set() else seen

    async def _described_by(self, process: ManagedProcess) -> Described | None:
        """None for a worker without a description. Between two roles it does not answer: its last description holds."""
        if process.state not in ("ready", "stopping") or process.spec.system_port is None:
            if gone := self._descriptions.pop(process, None):
                unlist(self._supervisor.run_dir.discovery, gone.instance)
            return None
        with suppress(OSError):
            if answer := await described(process.spec.system_port):
                self._descriptions[process] = answer
        return self._descriptions.get(process)

    def _fault(self, process: ManagedProcess, *, is_new: bool) -> str:
        """Why a worker that was never ready cannot be: after a failed start, or two in a new revision."""
        num_failed = process.deaths.failed_starts
        is_broken = process.is_given_up or num_failed >= (_FAILED_STARTS_OF_NEW_REVISION if is_new else 1)
        return process.deaths.last if is_broken and not process.was_ready.is_set() else ""

    def _notice_role(self, process: ManagedProcess, answer: Described | None, phase: Phase) -> None:
        """Takes the role from the worker itself, or for one that does not run, from the wish."""
        role: str = answer.description.role.value if answer else process.role
        if phase in (Phase.WAITING, Phase.GIVEN_UP):
            role = self.wanted.roles.get(process.name, role)
        if role != process.role:
            process.spec = replace(process.spec, role=cast(ProcessRole, role))
            self._supervisor.changed(process)

    # -- steps

    def _start(self, step: Start) -> None:
        try:
            (spec,) = self._specs([step])
        except ConfigError as error:  # for example no free GPU, which may change
            self._note_once(str(error))
            return
        self._supervisor.add(spec)
        self._coming.add(spec.name)
        for change in self._changes:
            change.started.add(spec.name)
        self.note(f"{spec.name} starts")

    def require_room(self, starts: Iterable[Start]) -> None:
        for spec in self._specs(starts):
            give_back(spec.ports.values())

    def _specs(self, starts: Iterable[Start]) -> list[ProcessSpec]:
        """Specs of more workers, on unused GPUs. Raises ConfigError if there are none."""
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
        """The first index without a log: reused names would overwrite logs."""
        names = [path.stem for path in self._supervisor.config.run_dir.glob(f"{role}-*.log")]
        names += [each.name for each in self._supervisor.processes]
        parts = (name.rpartition("-") for name in names)
        used = (int(number) for of, _, number in parts if of == role and number.isdigit())
        return max(used, default=-1) + 1

    async def _stop(self, one: Seen, drain_seconds: float | None) -> None:
        process, seconds = self._process(one), None
        if drain_seconds is not None and one.instance:
            process.leaves()
            self._supervisor.changed(process)
            seconds = drain_seconds + max(self._supervisor.config.beyond_drain_seconds, 0.0)
            try:
                await super()._stop(one, drain_seconds)
            except DisaggError:  # it ended before it answered, or is between two roles
                process.terminate()
        else:
            self.note(f"{one.name} finishes its requests and leaves")
        await self._supervisor.remove(process, seconds)
        end = "" if process.ended_well else f" ({process.describe_end()})"
        self.note(f"{one.name} has left{end}")

    async def _send(self, one: Seen, command: Command) -> dict[str, Any]:
        port = self._process(one).spec.system_port
        if port is None or not one.instance:
            raise InvalidRequestError(f"{one.name} takes no commands: its version has no description")
        return await command_worker(port, one.instance, self._signer, command)

    def _process(self, one: Seen) -> ManagedProcess:
        for each in self._supervisor.processes:
            if each.name == one.name:
                return each
        raise PeerUnavailableError("it is gone")

    # -- wishes

    def prepare(self, command: Rollout, say: Say) -> None:
        supervisor, wanted = self._supervisor, self.wanted
        supervisor.other_configs[command.revision] = self._config_of(command, say)
        counts = {role: count for role, count in wanted.workers.items() if count}
        if command.in_place:
            self._say_what_is_missing(counts, say)
            return
        starts = (Start(role, command.revision) for role, count in counts.items() for _ in range(count))
        try:
            self.require_room(starts)
        except ConfigError as error:
            del supervisor.other_configs[command.revision]
            raise ConfigError(f"{error}; --in-place replaces one worker at a time, on its own GPUs") from None

    def _say_what_is_missing(self, counts: Mapping[str, int], say: Say) -> None:
        for role, count in counts.items():
            least = f"{count - 1} of {count}" if count > 1 else "none"
            say(f"{least} {role} workers serve while one of them loads")
            if count == 1 and role in spec_of(self.wanted.strategy).kv_routed_roles:
                say(f"no worker takes requests while {role} loads: they get an error")

    def _config_of(self, command: Rollout, say: Say) -> DeploymentConfig:
        supervisor, wanted, old = self._supervisor, self.wanted, self._supervisor.config
        check_value("worker_revision", command.revision, "--to")
        if wanted.following is not None:
            allowed = f"{wanted.following}, which is in progress, or {wanted.revision!r} to take that back"
            raise ConfigError.bad_value("--to", command.revision, allowed)
        if command.revision in {each.revision for each in self.seen}:
            raise ConfigError.bad_value("--to", command.revision, "a name that no worker of this `up` has")
        argv = (command.python, *old.worker_command[1:]) if command.python else old.worker_command
        configs = {cast(ProcessRole, role): Path(file) for role, file in command.engine_configs.items()}
        config = replace(
            old,
            revision=command.revision,
            model=command.model or old.model,
            engine_configs=configs or old.engine_configs,
            worker_args=command.worker_args or old.worker_args,
            worker_command=argv,
        )
        config = with_workers(config, supervisor.environ)
        check_workers(config, supervisor.environ)
        needs = machine.Needs() if command.in_place else needs_of(config)
        for shortage in machine.check_limits(needs):
            say(f"warning: {shortage}")
        return config

    async def forget_ended(self) -> None:
        for process in [*self._supervisor.processes]:
            if process.role not in NO_WORKERS and (process.is_given_up or process.has_left):
                await self._supervisor.forget(process)

    def _want(self, wanted: Wanted) -> None:
        """Updates the configurations from which workers start, too."""
        supervisor = self._supervisor
        configs = supervisor.other_configs | {supervisor.config.revision: supervisor.config}
        for revision, config in configs.items():
            configs[revision] = replace(config, strategy=wanted.strategy, thresholds=wanted.thresholds)
        supervisor.config = configs.pop(wanted.revision)
        supervisor.other_configs = configs
        super()._want(wanted)
        with suppress(OSError):  # a full disk must not stop the deployment
            replace_json(supervisor.config.run_dir / WANTED_FILE, wanted)


def _phase(process: ManagedProcess, answer: Described | None) -> Phase:
    match process.state:
        case "planned" | "starting":
            return Phase.STARTING
        case "exited" if process.is_given_up:
            return Phase.GIVEN_UP
        case "exited" if process.stop_requested.is_set():
            return Phase.LEAVING
        case "restarting" | "exited":
            return Phase.WAITING
        case "stopping":
            return Phase.LEAVING
    return Phase.SERVING if answer is None else phase_of(answer.description)
