"""More or fewer workers of a deployment that serves."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from trtllm_disagg.deployment.plan import (
    WORKER_ROLES,
    ProcessSpec,
    Role,
    queue_flags,
    shared_env,
    worker_spec,
)
from trtllm_disagg.deployment.ports import free_system_ports
from trtllm_disagg.deployment.process import ManagedProcess
from trtllm_disagg.deployment.supervisor import Supervisor
from trtllm_disagg.errors import ConfigError

#: Each is a process of its own; a slip of the finger shall not take the machine.
MOST_WORKERS = 64


@dataclass(frozen=True)
class Scaler:
    supervisor: Supervisor

    async def scale(self, wanted: Mapping[Role, int], say: Callable[[str], None]) -> str:
        """Until as many workers of each role run as `wanted` says; other roles stay as they are. New ones come
        first, then the youngest go, one by one, each when its requests have ended. The line that says what runs.

        Raises ConfigError before anything is changed, DeploymentFailedError when a new worker does not come up.
        """
        self._check(wanted)
        await self._add_all(self._missing(wanted), say)
        for role, count in wanted.items():
            for process in self._running(role)[count:][::-1]:
                say(f"{process.name} finishes its requests and leaves")
                obeyed = await self.supervisor.remove(process)
                say(f"{process.name} has left" + ("" if obeyed else f" ({process.describe_end()})"))
        counts = Counter(process.role for process in self.supervisor.processes if process.stays)
        roles = WORKER_ROLES[self.supervisor.config.strategy]
        return "scaled: " + ", ".join(f"{counts[role]} {role}" for role in roles)

    def _missing(self, wanted: Mapping[Role, int]) -> list[ProcessSpec]:
        config = self.supervisor.config
        names = [
            (role, self._next_index(role) + i)
            for role, count in wanted.items()
            for i in range(count - len(self._running(role)))
        ]
        env, ports = shared_env(config, os.environ), free_system_ports(len(names))
        services = list(queue_flags(process.spec for process in self.supervisor.processes))
        return [
            worker_spec(config, role, index, env, port, services)
            for (role, index), port in zip(names, ports, strict=True)
        ]

    async def _add_all(self, specs: Iterable[ProcessSpec], say: Callable[[str], None]) -> None:
        """Side by side. When one does not come up, the others are waited for, and stay."""

        async def add(spec: ProcessSpec) -> None:
            say(f"{spec.name} starts")
            process = await self.supervisor.add(spec)
            say(f"{process.name} is ready (pid {process.pid})")

        for outcome in await asyncio.gather(*map(add, specs), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _check(self, wanted: Mapping[Role, int]) -> None:
        roles = WORKER_ROLES[self.supervisor.config.strategy]
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

    def _running(self, role: Role) -> list[ManagedProcess]:
        return [process for process in self.supervisor.processes if process.role == role and process.stays]

    def _next_index(self, role: Role) -> int:
        """No name is used twice, so that no log is written over."""
        names = [path.stem for path in self.supervisor.config.run_dir.glob(f"{role}-*.log")]
        numbers = [int(number) for name in names if (number := name.removeprefix(f"{role}-")).isdigit()]
        return max(numbers, default=-1) + 1
