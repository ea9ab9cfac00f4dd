"""Which other workers serve in this namespace, looked up once and not watched."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import Any

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime

from trtllm_disagg.commands import DescribedInstance
from trtllm_disagg.config.settings import parse_endpoint_id
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.types import GenerateRequest

_DESCRIBE_SECONDS = 5.0
_SYSTEM_PORT = "DYN_SYSTEM_PORT"


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


# What the other stage's instances have cached of a prompt, from their own cache events.


log = logging.getLogger(__name__)


class KvOverlaps:
    """Dynamo's index. Instances must have a model card, or it hears nothing of them (facts: dynamo.md section 2)."""

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
