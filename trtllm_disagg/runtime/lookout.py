"""Who else serves in this namespace, seen once and not watched."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from dynamo.runtime import DistributedRuntime

from trtllm_disagg.config import WorkerConfig
from trtllm_disagg.control import Told
from trtllm_disagg.runtime.handler import DESCRIBE
from trtllm_disagg.settings import parse_endpoint_id

_DESCRIBE_SECONDS = 5.0
_SYSTEM_PORT = "DYN_SYSTEM_PORT"


async def look_around(config: WorkerConfig, runtime: Any, endpoint_ids: Iterable[str]) -> list[Told]:
    """Every instance at each of these endpoints, and what it says of itself. Whoever does not answer, because it
    is dead or no worker of ours, is left out. `runtime` is this worker's own.
    """
    async with _passing_by(config, runtime) as passing:
        clients = {
            endpoint_id: await passing.endpoint(parse_endpoint_id(endpoint_id).dotted).client()
            for endpoint_id in endpoint_ids
        }
        places = [(i, where) for where, client in clients.items() for i in client.instance_ids()]
        answers = await asyncio.gather(*(described(clients[where], i) for i, where in places))
        return [
            Told(where, i, answer)
            for (i, where), answer in zip(places, answers, strict=True)
            if answer is not None
        ]


async def described(client: Any, instance_id: int) -> dict[str, Any] | None:
    """What an instance says of itself. None when it does not answer, because it is dead or no worker of ours."""
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
