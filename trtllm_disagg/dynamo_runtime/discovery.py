"""Reaches workers through Dynamo's discovery: calls to peers, descriptions, and cached prompt prefixes."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime

from trtllm_disagg import errors
from trtllm_disagg.admin.commands import DescribedInstance
from trtllm_disagg.common.machine import INOTIFY_KEY
from trtllm_disagg.common.reports import RateLimitedLog
from trtllm_disagg.config.settings import parse_endpoint_id
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.error_mapping import from_dynamo
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.dynamo_runtime.system_port import without_system_port
from trtllm_disagg.types import GenerateRequest, RequestContext

_DESCRIBE_SECONDS, _LISTED_SECONDS, _SEEN_SECONDS = 5.0, 0.1, 1.0
#: Dynamo's error if it may not watch another directory.
_NO_INOTIFY = "Too many open files"
log = logging.getLogger(__name__)
_warn = RateLimitedLog(log)


@dataclass(frozen=True, slots=True)
class DynamoDirectory:
    """The instances at an endpoint that discovery lists at each use."""

    client: Any

    def instance_ids(self) -> list[int]:
        return [*self.client.instance_ids()]

    def instance(self, instance_id: int) -> DynamoStageInstance:
        return DynamoStageInstance(self.client, instance_id)


@dataclass(frozen=True, slots=True)
class DynamoStageInstance:
    """One instance at an endpoint. Translates a call's errors to DisaggErrors."""

    client: Any
    instance_id: int

    async def describe(self) -> dict[str, Any]:
        async with aclosing(self.call({DESCRIBE: True}, None)) as answers:
            async for answer in answers:
                if isinstance(answer, dict):
                    return answer
        raise errors.PeerUnavailableError("an instance of the other stage sent no description")

    async def notify(self, notice: dict[str, Any]) -> None:
        async with aclosing(self.call(notice, None)) as answers:
            async for _ in answers:
                pass

    async def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            # The context carries request id, trace and cancellation.
            stream = await self.client.direct(request, self.instance_id, annotated=False, context=context)
            async for item in stream:
                yield item
        except errors.DisaggError as error:
            error.peer = self.instance_id
            raise
        except Exception as error:
            translated = from_dynamo(error)
            translated.peer = self.instance_id
            raise translated from error


class Clients:
    """Dynamo's clients of other workers and its KV routers, one per endpoint.

    A Dynamo runtime with a client leaves a listening TCP port behind at its shutdown (docs/log/dynamo.md). So with file
    discovery the clients share a runtime for the life of the process. With etcd, where a runtime's lease may end, they
    belong to the role term.
    """

    def __init__(self, config: WorkerConfig, runtime: Any = None) -> None:
        """`runtime`: the role term's; None: a separate one."""
        self._config = config
        self._runtime, self._is_own = runtime, runtime is None
        self._clients: dict[str, Any] = {}
        self._overlaps: dict[tuple[str, int], KvOverlaps] = {}

    async def of(self, endpoint_id: str) -> Any:
        """Raises ConfigError if the machine has no inotify instance left."""
        if endpoint_id not in self._clients:
            try:
                self._clients[endpoint_id] = await self._endpoint(endpoint_id).client()
            except Exception as error:
                if _NO_INOTIFY not in str(error):
                    raise
                advice = f"stop another deployment, or: sudo sysctl {INOTIFY_KEY}=1024"
                raise errors.ConfigError(f"no inotify instance is left ({error}); {advice}") from None
        return self._clients[endpoint_id]

    def overlaps(self, endpoint_id: str, block_size: int) -> KvOverlaps:
        """Returns the number of a prompt's tokens cached by the instances at an endpoint."""
        key = endpoint_id, block_size
        if key not in self._overlaps:
            self._overlaps[key] = KvOverlaps(self._endpoint(endpoint_id), block_size)
        return self._overlaps[key]

    async def list_instances(
        self, endpoint_ids: Iterable[str], own_id: int, describe_own: Callable[[], dict[str, Any]]
    ) -> list[DescribedInstance]:
        """The answering instances at these endpoints, with descriptions; each is called at its first endpoint."""
        listed = await self._listed(endpoint_ids)
        callees: dict[int, Any] = {}
        for endpoint_id, ids in listed.items():
            if new := ids - callees.keys() - {own_id}:
                client = await self.of(endpoint_id)
                callees |= dict.fromkeys(await _seen_by(client, new), client)
        answers = await asyncio.gather(*(described(client, i) for i, client in callees.items()))
        descriptions = dict(zip(callees, answers, strict=True)) | {own_id: describe_own()}
        return [
            DescribedInstance(where, i, description)
            for where, ids in listed.items()
            for i in ids
            if (description := descriptions.get(i)) is not None
        ]

    async def _listed(self, endpoint_ids: Iterable[str]) -> dict[str, set[int]]:
        """The instance ids at each endpoint; from the files if possible, since a client costs two of a user's 128
        inotify instances.
        """
        if self._config.discovery_backend == "file" and (found := listed_in_files(endpoint_ids)) is not None:
            return found
        clients = {endpoint_id: await self.of(endpoint_id) for endpoint_id in endpoint_ids}
        # A new client lists no instance for some milliseconds; an empty endpoint's never does.
        listed = [asyncio.ensure_future(client.wait_for_instances()) for client in clients.values()]
        _, empty = await asyncio.wait(listed, timeout=_LISTED_SECONDS)
        for each in empty:
            each.cancel()
        return {endpoint_id: {*client.instance_ids()} for endpoint_id, client in clients.items()}

    def close(self) -> None:
        if self._is_own and self._runtime is not None:
            self._runtime.shutdown()

    def _endpoint(self, endpoint_id: str) -> Any:
        if self._runtime is None:
            config = self._config
            with without_system_port():
                self._runtime = DistributedRuntime(
                    asyncio.get_running_loop(),
                    config.discovery_backend,
                    config.request_plane,
                    event_plane=config.event_plane,
                )
        return self._runtime.endpoint(parse_endpoint_id(endpoint_id).dotted)


async def _seen_by(client: Any, ids: set[int]) -> set[int]:
    """The instances that a client knows: it learns of a new one some milliseconds later."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while not ids <= (known := {*client.instance_ids()}) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_SEEN_SECONDS / 100)
    return ids & known


async def described(client: Any, instance_id: int, warn: RateLimitedLog = _warn) -> dict[str, Any] | None:
    """An instance's description; None if it does not answer, or is no worker of this package."""
    try:
        async with asyncio.timeout(_DESCRIBE_SECONDS):
            return await DynamoStageInstance(client, instance_id).describe()
    except Exception as error:
        warn("instance %x sent no description: %s: %s", instance_id, type(error).__name__, error)
        return None


@dataclass(frozen=True)
class KvOverlaps:
    """Counts a prompt's tokens in each peer's cache, by the cache events of peers with a model card."""

    endpoint: Any
    block_size: int

    @cached_property
    def _router(self) -> Any:
        """Created at first use: it watches discovery and subscribes to every instance's events."""
        return KvRouter(self.endpoint, self.block_size, KvRouterConfig())

    def listen(self) -> None:
        """Subscribe to events before the first request."""
        try:
            _ = self._router
        except Exception as error:
            log.warning("no KV router; the first request will try again: %s", error)

    async def __call__(self, request: GenerateRequest) -> Mapping[int, int]:
        """Instance id -> number of cached prompt tokens. Raises what Dynamo raises."""
        token_ids, block_mm_infos = routed_prompt(request.raw, request.token_ids)
        scores = await self._router.get_overlap_scores(
            token_ids, block_mm_infos=block_mm_infos, cache_namespace=request.cache_salt
        )
        cached: dict[int, int] = {}
        for row in scores["workers"]:  # one row per attention-DP rank
            tokens = row["device_blocks"] * self.block_size
            cached[row["worker_id"]] = max(tokens, cached.get(row["worker_id"], 0))
        return cached


def routed_prompt(raw: Mapping[str, Any], token_ids: list[int]) -> tuple[list[int], list[Any] | None]:
    """The prompt as KV routers compare it: (token ids, each block's images). Dynamo's frontend replaces each image's
    marker by numbers of the image. For model families where it does not, only text before an image is found cached.
    """
    expanded = raw.get("mm_routing_info") or {}
    return expanded.get("routing_token_ids") or token_ids, expanded.get("block_mm_infos") or None


def _instance_files() -> set[str]:
    """The names, with slashes, of all instances' files in file discovery. Raises OSError."""
    store = os.environ.get("DYN_FILE_KV") or Path(tempfile.gettempdir()) / "dynamo_store_kv"
    return {unquote(name) for name in os.listdir(Path(store) / "v1" / "instances")}


def _files_of(endpoint_id: str) -> str:
    return parse_endpoint_id(endpoint_id).dotted.replace(".", "/") + "/"


def listed_in_files(endpoint_ids: Iterable[str]) -> dict[str, set[int]] | None:
    """The instance ids at each endpoint in file discovery; None if unknown."""
    try:
        there = _instance_files()
        return {
            each: {int(name.removeprefix(path), 16) for name in there if name.startswith(path)}
            for each, path in ((each, _files_of(each)) for each in endpoint_ids)
        }
    except (OSError, ValueError):
        return None


class DiscoveryFiles:
    """The files of a worker's instances. Each process touches its files every few seconds, and removes others untouched
    for 10 s, which Dynamo does not write again.
    """

    def __init__(self, instance_id: int) -> None:
        self._name = f"{instance_id:x}"
        #: Only a file once seen can be lost: another Dynamo version may write others.
        self._seen: set[str] = set()

    def has_lost(self, endpoint_ids: Iterable[str]) -> bool:
        """Whether one of this worker's files at these endpoints has disappeared; False if unknown."""
        try:
            there = _instance_files()
        except OSError:
            return False
        self._seen = (self._seen | there) & {_files_of(each) + self._name for each in endpoint_ids}
        return not self._seen <= there
