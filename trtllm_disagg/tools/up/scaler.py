"""Changes how many workers of each role a deployment runs, and their revision, while it serves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from trtllm_disagg.admin.commands import Rollout
from trtllm_disagg.config.worker_config import check_value
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.gpus import gpus_of, longest_sequence, worker_configs
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import (
    MOST_WORKERS,
    DeploymentConfig,
    DeploymentFailedError,
    ProcessRole,
    ProcessSpec,
    devices_of,
    queue_env,
    shared_env,
    worker_arguments,
    worker_spec,
)
from trtllm_disagg.tools.up.ports import free_system_ports
from trtllm_disagg.tools.up.supervisor import Supervisor

Say = Callable[[str], None]


def with_workers(config: DeploymentConfig) -> DeploymentConfig:
    """With what follows from its workers' arguments. Raises ConfigError for wrong ones."""
    workers = worker_arguments(config)
    # As the workers have it, by --worker-args too.
    configs = [worker for _, worker in worker_configs(workers, os.environ)]
    for worker in configs:
        worker.engine_spec.require_installed()
    return replace(
        config,
        max_seq_len=longest_sequence(configs),
        longest_drain=max((worker.drain_seconds for worker in configs), default=None),
        gpus=gpus_of(workers, config.gpu_devices, os.environ),
    )


@dataclass(frozen=True)
class Scaler:
    supervisor: Supervisor

    async def scale(self, wanted: Mapping[str, int], say: Say) -> dict[str, int]:
        """Start or stop workers until `wanted` runs, a number by role; other roles do not change. New workers start
        first. Then others leave, one by one, when their requests have ended: those that do not serve, then the
        youngest. Returns the running number by role.

        Raises ConfigError before anything is changed, DeploymentFailedError when a new worker does not become ready.
        """
        counts = self._checked(wanted)
        missing = {role: count - len(self._running(role)) for role, count in counts.items()}
        await self._add_all(self._more(self.supervisor.config, missing), say)
        for role, count in counts.items():
            serving_first = sorted(self._running(role), key=lambda process: process.state != "ready")
            for process in serving_first[count:][::-1]:
                say(f"{process.name} finishes its requests and leaves")
                obeyed = await self.supervisor.remove(process)
                say(f"{process.name} has left" + ("" if obeyed else f" ({process.describe_end()})"))
        return {role: len(self._running(role)) for role in spec_of(self.supervisor.config.strategy).roles}

    async def roll_out(self, change: Rollout, say: Say) -> str:
        """Start as many workers of another revision as there are now, and return its name. The second stage starts
        first, so that a first stage registers when it has its pair. From then on workers of other revisions may end.
        A rollout that is done already changes nothing.

        Raises ConfigError before anything is changed, DeploymentFailedError when a new worker does not become ready;
        then the new ones are removed.
        """
        supervisor, old = self.supervisor, self.supervisor.config
        if change.revision == old.revision:
            return change.revision
        config = self._changed(change)
        roles = spec_of(old.strategy).stop_order[::-1]
        specs = self._more(config, {role: len(self._running(role)) for role in roles})
        try:
            for role in roles:
                await self._add_all((spec for spec in specs if spec.role == role), say)
            if len(self._of_revision(change.revision)) < len(specs):
                raise DeploymentFailedError(f"a worker of revision {change.revision} has ended meanwhile")
        except DisaggError:
            for process in self._of_revision(change.revision):
                await supervisor.remove(process)
                say(f"{process.name} is removed")
            raise
        supervisor.config = config
        return change.revision

    def _changed(self, change: Rollout) -> DeploymentConfig:
        check_value("worker_revision", change.revision, "--to")
        old = self.supervisor.config
        if change.revision in self.other_revisions():
            raise ConfigError.bad_value("--to", change.revision, "a name that no worker of this `up` has")
        configs = {cast(ProcessRole, role): Path(file) for role, file in change.engine_configs.items()}
        command = (change.python, *old.worker_command[1:]) if change.python else old.worker_command
        return with_workers(
            replace(
                old,
                revision=change.revision,
                model=change.model or old.model,
                engine_configs=configs or old.engine_configs,
                worker_args=change.worker_args or old.worker_args,
                worker_command=command,
            )
        )

    def other_revisions(self) -> set[str]:
        """Of workers that run, beside the current one."""
        running = {each.spec.revision for each in self.supervisor.processes if each.is_running}
        return {each for each in running if each not in (None, self.supervisor.config.revision)}

    def _of_revision(self, revision: str) -> list[ManagedProcess]:
        """All its workers, also those that leave."""
        return [each for each in self.supervisor.processes if each.spec.revision == revision]

    def _more(self, config: DeploymentConfig, counts: Mapping[ProcessRole, int]) -> list[ProcessSpec]:
        """So many more workers of each role, on GPUs that no other one uses."""
        names = [(role, self._next_index(role) + i) for role, count in counts.items() for i in range(count)]
        env, ports = shared_env(config, os.environ), free_system_ports(len(names))
        env |= queue_env(process.spec for process in self.supervisor.processes)
        specs: list[ProcessSpec] = []
        for (role, index), port in zip(names, ports, strict=True):
            holding = (process.spec for process in self.supervisor.processes if process.holds_gpus)
            devices = config.gpus.environment(role, devices_of([*holding, *specs]))
            specs.append(worker_spec(config, role, index, env | devices, port))
        return specs

    async def _add_all(self, specs: Iterable[ProcessSpec], say: Say) -> None:
        """Start workers in parallel. When one does not become ready, the others still do, and stay."""

        async def add(spec: ProcessSpec) -> None:
            say(f"{spec.name} starts")
            process = await self.supervisor.add(spec)
            say(f"{process.name} is ready (pid {process.pid})")

        for outcome in await asyncio.gather(*map(add, specs), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _checked(self, wanted: Mapping[str, int]) -> dict[ProcessRole, int]:
        roles = spec_of(self.supervisor.config.strategy).roles
        for role, count in wanted.items():
            if role not in roles:
                raise ConfigError.bad_value(
                    f"--{role}",
                    count,
                    f"one of {', '.join('--' + name for name in roles)}: "
                    f"{self.supervisor.config.strategy} has no other workers",
                )
            if not 1 <= count <= MOST_WORKERS:
                raise ConfigError.bad_value(f"--{role}", count, f"1 to {MOST_WORKERS} workers")
        return {cast(ProcessRole, role): count for role, count in wanted.items()}

    def _running(self, role: ProcessRole) -> list[ManagedProcess]:
        current = self._of_revision(self.supervisor.config.revision)
        return [process for process in current if process.role == role and process.stays]

    def _next_index(self, role: ProcessRole) -> int:
        """The first index without a log: names are never used twice, so that no log is overwritten."""
        names = [path.stem for path in self.supervisor.config.run_dir.glob(f"{role}-*.log")]
        numbers = [int(number) for name in names if (number := name.removeprefix(f"{role}-")).isdigit()]
        return max(numbers, default=-1) + 1
