"""The workers of a namespace, through Dynamo's discovery: calls to peers, descriptions, and cached prompt prefixes."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime

from trtllm_disagg import errors
from trtllm_disagg.admin.commands import DescribedInstance
from trtllm_disagg.config.settings import parse_endpoint_id
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.error_mapping import from_dynamo
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.dynamo_runtime.system_port import without_system_port
from trtllm_disagg.processes.reports import RateLimitedLog
from trtllm_disagg.types import GenerateRequest, RequestContext

_DESCRIBE_SECONDS, _LISTED_SECONDS = 5.0, 0.1
log = logging.getLogger(__name__)
_warn = RateLimitedLog(log)


class DynamoDirectory:
    """The instances at an endpoint."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def instance_ids(self) -> list[int]:
        ids: list[int] = self._client.instance_ids()
        return ids

    def instance(self, instance_id: int) -> DynamoStageInstance:
        return DynamoStageInstance(self._client, instance_id)


class DynamoStageInstance:
    """One instance at an endpoint. Errors of a call are translated to DisaggErrors."""

    def __init__(self, client: Any, instance_id: int) -> None:
        self._client = client
        self.instance_id = instance_id

    async def describe(self) -> dict[str, Any]:
        async with aclosing(self.call({DESCRIBE: True}, None)) as answers:
            async for answer in answers:
                if isinstance(answer, dict):
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
    """The instances at these endpoints that answer, with their descriptions. `runtime`: this worker's own."""
    async with _short_lived_runtime(config, runtime) as listing:
        clients = {
            endpoint_id: await listing.endpoint(parse_endpoint_id(endpoint_id).dotted).client()
            for endpoint_id in endpoint_ids
        }
        # A new client lists no instance for some milliseconds; that of an empty endpoint goes on so.
        listed = [asyncio.ensure_future(client.wait_for_instances()) for client in clients.values()]
        _, empty = await asyncio.wait(listed, timeout=_LISTED_SECONDS)
        for each in empty:
            each.cancel()
        places = [(i, where) for where, client in clients.items() for i in client.instance_ids()]
        answers = await asyncio.gather(*(described(clients[where], i) for i, where in places))
        return [
            DescribedInstance(where, i, answer)
            for (i, where), answer in zip(places, answers, strict=True)
            if answer is not None
        ]


async def described(client: Any, instance_id: int, warn: RateLimitedLog = _warn) -> dict[str, Any] | None:
    """The description of an instance; None when it does not answer, or is no worker of this package."""
    try:
        async with asyncio.timeout(_DESCRIBE_SECONDS):
            return await DynamoStageInstance(client, instance_id).describe()
    except Exception as error:
        warn("instance %x did not describe itself: %s: %s", instance_id, type(error).__name__, error)
        return None


@asynccontextmanager
async def _short_lived_runtime(config: WorkerConfig, runtime: Any) -> AsyncIterator[Any]:
    """For each endpoint that a runtime lists in a discovery directory, it holds one of a user's 128 inotify watches
    until it is shut down. So listing uses a runtime of its own, which lives for some milliseconds.
    """
    if config.discovery_backend != "file":
        yield runtime
        return
    with without_system_port():
        listing = DistributedRuntime(
            asyncio.get_running_loop(), "file", config.request_plane, event_plane=config.event_plane
        )
    try:
        yield listing
    finally:
        listing.shutdown()


class KvOverlaps:
    """How many tokens of a prompt each peer has cached, by the cache events of peers that have a model card."""

    def __init__(self, endpoint: Any, block_size: int) -> None:
        self._endpoint = endpoint
        self._block_size = block_size

    @cached_property
    def _router(self) -> Any:
        """Made at the first use: it watches discovery and subscribes to the events of every instance."""
        return KvRouter(self._endpoint, self._block_size, KvRouterConfig())

    def listen(self) -> None:
        """Subscribe to events now, and not with the first request."""
        try:
            _ = self._router
        except Exception as error:
            log.warning("no KV router yet, the first request will try again: %s", error)

    async def __call__(self, request: GenerateRequest) -> Mapping[int, int]:
        """Instance id -> number of prompt tokens that it has cached. Raises what Dynamo raises."""
        scores = await self._router.get_overlap_scores(request.token_ids, cache_namespace=request.cache_salt)
        cached: dict[int, int] = {}
        for row in scores["workers"]:  # one row for each attention-DP rank
            tokens = row["device_blocks"] * self._block_size
            cached[row["worker_id"]] = max(tokens, cached.get(row["worker_id"], 0))
        return cached


class DiscoveryFiles:
    """The files of a worker's instances. Each process touches its own ones every few seconds, and removes others that
    have not been touched for 10 s, for example because nothing could be written. Dynamo does not write them again.
    """

    def __init__(self, instance_id: int) -> None:
        store = os.environ.get("DYN_FILE_KV") or Path(tempfile.gettempdir()) / "dynamo_store_kv"
        self._directory = Path(store) / "v1" / "instances"
        self._instance_id = instance_id
        #: Only a file that was there can be lost: another version of Dynamo may write other ones.
        self._seen: set[str] = set()

    def has_lost(self, endpoint_ids: Iterable[str]) -> bool:
        """Whether this worker's file at one of these endpoints was there and is no more; False where unknown."""
        try:
            there = {unquote(name) for name in os.listdir(self._directory)}
        except OSError:
            return False
        keys = {self._key(each) for each in endpoint_ids}
        self._seen = (self._seen | there) & keys
        return not self._seen <= there

    def _key(self, endpoint_id: str) -> str:
        return f"{parse_endpoint_id(endpoint_id).dotted.replace('.', '/')}/{self._instance_id:x}"
