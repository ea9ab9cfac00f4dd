"""The workers of a namespace, through Dynamo: what they are, what they are told from outside, and what they have
cached; and the workers of the other role, called for requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import cached_property
from typing import Any

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime

from trtllm_disagg import errors
from trtllm_disagg.commands import CONTROL, Command, Describe, DescribedInstance, Signer
from trtllm_disagg.config.settings import endpoint_of, parse_endpoint_id
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.error_mapping import from_dynamo
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.errors import DisaggError, PeerUnavailableError, StageTimeoutError
from trtllm_disagg.types import GenerateRequest, RequestContext

_DESCRIBE_SECONDS = 5.0
_SYSTEM_PORT = "DYN_SYSTEM_PORT"
_FOUND_SECONDS = 3.0
_POLL_SECONDS = 0.15
log = logging.getLogger(__name__)


class DynamoDirectory:
    """The instances at an endpoint."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def instance_ids(self) -> list[int]:
        ids: list[int] = self._client.instance_ids()
        return ids

    def instance(self, instance_id: int) -> DynamoStageInstance:
        return DynamoStageInstance(self._client, instance_id)

    async def describe(self) -> dict[str, Any]:
        """What any of them says of itself. Raises a DisaggError."""
        for instance_id in self.instance_ids():
            return await self.instance(instance_id).describe()
        raise errors.NoInstanceError("no instance of the other stage is there")


class DynamoStageInstance:
    """One of them. Whatever becomes of it is translated."""

    def __init__(self, client: Any, instance_id: int) -> None:
        self._client = client
        self.instance_id = instance_id

    async def describe(self) -> dict[str, Any]:
        async with aclosing(self.call({DESCRIBE: True}, None)) as answers:
            async for answer in answers:
                return answer
        raise errors.PeerUnavailableError("an instance of the other stage did not describe itself")

    async def notify(self, notice: dict[str, Any]) -> None:
        async with aclosing(self.call(notice, None)) as answers:
            async for _ in answers:
                pass

    async def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            # The context carries request id, trace and cancellation.
            stream = await self._client.direct(request, self.instance_id, annotated=False, context=context)
            async for item in stream:
                yield item
        except errors.DisaggError as error:
            error.peer = self.instance_id
            raise
        except Exception as error:
            translated = from_dynamo(error)
            translated.peer = self.instance_id
            raise translated from error


async def list_instances(
    config: WorkerConfig, runtime: Any, endpoint_ids: Iterable[str]
) -> list[DescribedInstance]:
    """Every instance at each of these endpoints, and what it says of itself. An instance that does not answer,
    because it is dead or no worker of this package, is left out. `runtime` is this worker's own.
    """
    async with _passing_by(config, runtime) as passing:
        clients = {
            endpoint_id: await passing.endpoint(parse_endpoint_id(endpoint_id).dotted).client()
            for endpoint_id in endpoint_ids
        }
        places = [(i, where) for where, client in clients.items() for i in client.instance_ids()]
        answers = await asyncio.gather(*(described(clients[where], i) for i, where in places))
        return [
            DescribedInstance(where, i, answer)
            for (i, where), answer in zip(places, answers, strict=True)
            if answer is not None
        ]


async def described(client: Any, instance_id: int) -> dict[str, Any] | None:
    """What an instance says of itself; None when it is dead, or no worker of this package."""
    try:
        async with asyncio.timeout(_DESCRIBE_SECONDS):
            answers = [item.data() async for item in await client.direct({DESCRIBE: True}, instance_id)]
    except Exception:
        return None
    return answers[0] if len(answers) == 1 and isinstance(answers[0], dict) else None


@asynccontextmanager
async def _passing_by(config: WorkerConfig, runtime: Any) -> AsyncIterator[Any]:
    """Each endpoint that a runtime looks at in a discovery directory costs one of a user's 128 watches for as long
    as that runtime lives. So a runtime of its own looks there, for some milliseconds.
    """
    if config.discovery_backend != "file":
        yield runtime
        return
    with _without_system_port():
        passing = DistributedRuntime(
            asyncio.get_running_loop(), "file", config.request_plane, event_plane=config.event_plane
        )
    try:
        yield passing
    finally:
        passing.shutdown()


@contextmanager
def _without_system_port() -> Iterator[None]:
    """That port is taken, by this worker's own runtime. Dynamo has no argument for it."""
    port = os.environ.pop(_SYSTEM_PORT, None)
    try:
        yield
    finally:
        if port is not None:
            os.environ[_SYSTEM_PORT] = port


class Controller:
    """Finds the workers of a deployment from outside, and sends them commands."""

    def __init__(self, clients: Mapping[str, Any], signer: Signer, timeout: float) -> None:
        self._clients = clients
        self._signer = signer
        self._timeout = timeout

    async def workers(self) -> list[DescribedInstance]:
        """Every worker in discovery, as it describes itself. One that died meanwhile is left out."""
        await self._settled()
        # A first stage is at two endpoints; the later one, of its role, is where it always is.
        names = {i: endpoint for endpoint, client in self._clients.items() for i in client.instance_ids()}
        answers = await asyncio.gather(
            *(self.send(endpoint, i, Describe()) for i, endpoint in names.items()), return_exceptions=True
        )
        return [
            DescribedInstance(endpoint, instance_id, _answer(answer))
            for (instance_id, endpoint), answer in zip(names.items(), answers, strict=True)
            if not isinstance(answer, PeerUnavailableError)
        ]

    async def _settled(self) -> None:
        """A fresh client learns of the instances bit by bit."""
        seen: list[list[int]] = []
        for _ in range(round(_FOUND_SECONDS / _POLL_SECONDS)):
            now = [sorted(client.instance_ids()) for client in self._clients.values()]
            if all(now) and now == seen:
                return
            seen = now
            await asyncio.sleep(_POLL_SECONDS)

    async def send(self, endpoint_id: str, instance_id: int, command: Command) -> dict[str, Any]:
        """What the worker answers. Raises a DisaggError: what it has refused, or that it does not answer in time."""
        name = f"instance {instance_id:x} at {endpoint_id}"
        try:
            async with asyncio.timeout(self._timeout):
                request = self._signer.request(command, instance_id)
                stream = await self._clients[endpoint_id].direct(request, instance_id)
                answers = [item.data() async for item in stream if not item.is_error()]
        except TimeoutError:
            raise StageTimeoutError(f"{name} did not answer within {self._timeout:g} s") from None
        except Exception as error:
            raise _named(from_dynamo(error), name) from error
        if len(answers) != 1 or not isinstance(answers[0], dict):
            raise PeerUnavailableError(f"{name} does not know {CONTROL}")
        return answers[0]


@asynccontextmanager
async def controller(
    *, backend: str, request_plane: str, event_plane: str, namespace: str, signer: Signer, timeout: float
) -> AsyncIterator[Controller]:
    """For the workers of a namespace at their usual endpoints. Discovery is found as every Dynamo process does, by
    environment variables.
    """
    runtime = DistributedRuntime(asyncio.get_running_loop(), backend, request_plane, event_plane=event_plane)
    try:
        endpoints = [endpoint_of(namespace, role) for role in (None, Role.PREFILL, Role.DECODE)]
        clients = {
            endpoint: await runtime.endpoint(parse_endpoint_id(endpoint).dotted).client()
            for endpoint in endpoints
        }
        yield Controller(clients, signer, timeout)
    finally:
        runtime.shutdown()


def _answer(answer: dict[str, Any] | BaseException) -> dict[str, Any]:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _named(error: DisaggError, name: str) -> DisaggError:
    return type(error)(f"{name}: {error}")


class KvOverlaps:
    """What the other stage's instances have cached of a prompt, by Dynamo's index of their cache events.

    Instances must have a model card, or the index hears nothing of them.
    """

    def __init__(self, endpoint: Any, block_size: int) -> None:
        self._endpoint = endpoint
        self._block_size = block_size

    @cached_property
    def _router(self) -> Any:
        """Watches discovery and listens to every instance, so it is made at the first use only."""
        return KvRouter(self._endpoint, self._block_size, KvRouterConfig())

    def listen(self) -> None:
        """From now on, and not from the first request on."""
        try:
            _ = self._router
        except Exception as error:
            log.warning("no KV router yet, the first request will try again: %s", error)

    async def __call__(self, request: GenerateRequest) -> Mapping[int, int]:
        """Tokens of the prompt, by instance. Raises what Dynamo raises."""
        scores = await self._router.get_overlap_scores(request.token_ids, cache_namespace=request.cache_salt)
        cached: dict[int, int] = {}
        for row in scores["workers"]:  # one for each rank of attention DP
            tokens = row["device_blocks"] * self._block_size
            cached[row["worker_id"]] = max(tokens, cached.get(row["worker_id"], 0))
        return cached
