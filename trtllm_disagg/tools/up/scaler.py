"""Changes how many workers of each role a deployment runs, while it serves."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import (
    MOST_WORKERS,
    ProcessRole,
    ProcessSpec,
    devices_of,
    queue_env,
    shared_env,
    worker_spec,
)
from trtllm_disagg.tools.up.ports import free_system_ports
from trtllm_disagg.tools.up.supervisor import Supervisor

Say = Callable[[str], None]


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
        await self._add_all(self._missing(counts), say)
        for role, count in counts.items():
            serving_first = sorted(self._running(role), key=lambda process: process.state != "ready")
            for process in serving_first[count:][::-1]:
                say(f"{process.name} finishes its requests and leaves")
                obeyed = await self.supervisor.remove(process)
                say(f"{process.name} has left" + ("" if obeyed else f" ({process.describe_end()})"))
        running = Counter(process.role for process in self.supervisor.processes if process.stays)
        return {role: running[role] for role in spec_of(self.supervisor.config.strategy).roles}

    def _missing(self, wanted: Mapping[ProcessRole, int]) -> list[ProcessSpec]:
        config = self.supervisor.config
        names = [
            (role, self._next_index(role) + i)
            for role, count in wanted.items()
            for i in range(count - len(self._running(role)))
        ]
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
        return [process for process in self.supervisor.processes if process.role == role and process.stays]

    def _next_index(self, role: ProcessRole) -> int:
        """The first index without a log: names are never used twice, so that no log is overwritten."""
        names = [path.stem for path in self.supervisor.config.run_dir.glob(f"{role}-*.log")]
        numbers = [int(number) for name in names if (number := name.removeprefix(f"{role}-")).isdigit()]
        return max(numbers, default=-1) + 1
