"""Finds a deployment's workers from outside, for `switch` and `set`, and sends them commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dynamo._core import VirtualConnectorClient
from dynamo.runtime import DistributedRuntime

from trtllm_disagg.admin.commands import CONTROL, Command, DescribedInstance, Leave, Signer
from trtllm_disagg.config.settings import endpoint_of, parse_endpoint_id
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.dynamo_runtime.error_mapping import from_dynamo
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.errors import ConfigError, PeerUnavailableError, StageTimeoutError

_FOUND_SECONDS = 3.0
_POLL_SECONDS = 0.15


@dataclass(frozen=True, slots=True)
class Controller:
    """Finds a deployment's workers, and sends them commands."""

    #: Dynamo's clients by endpoint id.
    clients: Mapping[str, Any]
    signer: Signer
    timeout: float

    async def workers(self) -> list[DescribedInstance]:
        """Every live worker in discovery with its description."""
        await self._until_settled()
        # A first stage is at two endpoints. The later one, its role's, stays in use after a switch.
        names = {i: endpoint for endpoint, client in self.clients.items() for i in client.instance_ids()}
        answers = await asyncio.gather(
            *(self._ask(endpoint, i, {DESCRIBE: True}, self.timeout) for i, endpoint in names.items()),
            return_exceptions=True,
        )
        workers = []
        for (instance_id, endpoint), answer in zip(names.items(), answers, strict=True):
            if isinstance(answer, dict):
                workers.append(DescribedInstance(endpoint, instance_id, answer))
            elif not isinstance(answer, PeerUnavailableError):
                raise answer
        return workers

    async def _until_settled(self) -> None:
        """Wait until two polls agree: a new client gets the instances one by one."""
        seen: list[list[int]] = []
        for _ in range(round(_FOUND_SECONDS / _POLL_SECONDS)):
            before, seen = seen, [sorted(client.instance_ids()) for client in self.clients.values()]
            if all(seen) and seen == before:
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def send(self, endpoint_id: str, instance_id: int, command: Command) -> dict[str, Any]:
        """Send a command and return its answer. Raises a DisaggError if it is refused or not answered in time."""
        request = self.signer.request(command, instance_id)
        drains = command.seconds if isinstance(command, Leave) else 0.0
        return await self._ask(endpoint_id, instance_id, request, self.timeout + drains)

    async def _ask(
        self, endpoint_id: str, instance_id: int, request: dict[str, Any], timeout: float
    ) -> dict[str, Any]:
        name = f"instance {instance_id:x} at {endpoint_id}"
        try:
            async with asyncio.timeout(timeout):
                stream = await self.clients[endpoint_id].direct(request, instance_id)
                answers = [item.data() async for item in stream if not item.is_error()]
        except TimeoutError:
            raise StageTimeoutError(f"{name} did not answer within {timeout:g} s") from None
        except Exception as error:
            here = from_dynamo(error)
            raise type(here)(f"{name}: {here}") from error
        if len(answers) != 1 or not isinstance(answers[0], dict):
            raise PeerUnavailableError(f"{name} does not know {CONTROL}")
        return answers[0]


@asynccontextmanager
async def controller(
    where: Mapping[str, str], namespaces: Iterable[str], signer: Signer, timeout: float
) -> AsyncIterator[Controller]:
    """Control the workers of these namespaces at their usual endpoints. `where`: of `args.WHEREABOUTS`. Dynamo's
    variables locate discovery.
    """
    loop, events = asyncio.get_running_loop(), where["event_plane"]
    runtime = DistributedRuntime(loop, where["discovery_backend"], where["request_plane"], event_plane=events)
    try:
        usual = [endpoint_of(each, role) for each in namespaces for role in (None, Role.PREFILL, Role.DECODE)]
        clients = {each: await runtime.endpoint(parse_endpoint_id(each).dotted).client() for each in usual}
        yield Controller(clients, signer, timeout)
    finally:
        runtime.shutdown()


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of workers by role, by Dynamo's planner; without roles that it does not decide."""

    id: int
    workers: Mapping[str, int]
    given: Any


@dataclass(frozen=True, slots=True)
class Planner:
    """Reads Dynamo's planner's decisions, which its virtual connector keeps in etcd."""

    connector: Any

    async def newest(self) -> Decision:
        given = await self.connector.get()
        numbers = {"prefill": given.num_prefill_workers, "decode": given.num_decode_workers}
        decided = {role: number for role, number in numbers.items() if number >= 0}
        return Decision(given.decision_id, decided, given)

    async def confirm(self, decision: Decision) -> None:
        """Report that the numbers are reached."""
        await self.connector.complete(decision.given)


@asynccontextmanager
async def planner(namespace: str) -> AsyncIterator[Planner]:
    """Raises ConfigError without etcd."""
    try:
        runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="zmq")
    except Exception as error:
        raise ConfigError(f"the planner's decisions are in etcd [ETCD_ENDPOINTS]: {error}") from None
    try:
        yield Planner(VirtualConnectorClient(runtime, namespace))
    finally:
        runtime.shutdown()
