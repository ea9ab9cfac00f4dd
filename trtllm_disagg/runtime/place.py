"""A worker's place in a Dynamo deployment: its endpoint, its registration, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dynamo.common.utils.graceful_shutdown import install_signal_handlers
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

from trtllm_disagg.config import Role, Strategy, WorkerConfig
from trtllm_disagg.runtime.handler import DESCRIBE, as_dynamo_handler
from trtllm_disagg.runtime.kv_overlaps import KvOverlaps
from trtllm_disagg.runtime.stage import DynamoDirectory
from trtllm_disagg.settings import parse_endpoint_id
from trtllm_disagg.types import Generate

log = logging.getLogger(__name__)

_DESCRIBE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the frontend's model card says about this worker's engine."""

    block_size: int
    num_blocks: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int


class Runtime:
    """Whoever makes it shuts it down."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._runtime = DistributedRuntime(
            asyncio.get_running_loop(),
            config.discovery_backend,
            config.request_plane,
            event_plane=config.event_plane,
        )
        self.endpoint = self._runtime.endpoint(parse_endpoint_id(config.endpoint_id).dotted)
        self.instance_id: int = self.endpoint.connection_id()
        self._clients: dict[str, Any] = {}
        self._told_to_stop = False

    async def second_stage(self, endpoint_id: str) -> DynamoDirectory | None:
        """The instances of the other stage, once there is one; None when told to stop before."""
        client = await self._client(endpoint_id)
        log.info("waiting for the second stage at %s", endpoint_id)
        try:
            await client.wait_for_instances()
        except Exception:
            if self._told_to_stop:
                return None
            raise
        return DynamoDirectory(client)

    async def stage(self, endpoint_id: str) -> DynamoDirectory:
        """The same without waiting: whoever is there when a request needs one."""
        return DynamoDirectory(await self._client(endpoint_id))

    def overlaps(self, endpoint_id: str, block_size: int) -> KvOverlaps:
        """What the instances at an endpoint have cached of a prompt."""
        return KvOverlaps(self._runtime.endpoint(parse_endpoint_id(endpoint_id).dotted), block_size)

    async def partners(self, endpoint_id: str) -> list[dict[str, Any]]:
        """What those who are at an endpoint now say of themselves. Who does not answer is left out."""
        client = await self._client(endpoint_id)
        answers: list[dict[str, Any]] = []
        for instance_id in client.instance_ids():
            with suppress(Exception):
                async with asyncio.timeout(_DESCRIBE_SECONDS):
                    async for item in await client.direct({DESCRIBE: True}, instance_id):
                        answers.append(item.data())
        return answers

    async def _client(self, endpoint_id: str) -> Any:
        """One for each endpoint: every one watches the discovery directory, and a user may have 128 watches."""
        if endpoint_id not in self._clients:
            endpoint = self._runtime.endpoint(parse_endpoint_id(endpoint_id).dotted)
            self._clients[endpoint_id] = await endpoint.client()
        return self._clients[endpoint_id]

    async def register(self, model: ServedModel, *, is_routed: bool = True) -> None:
        """Make this worker known to the frontend; or, not `is_routed`, to the KV routers of the other stage only."""
        config = self._config
        card = ModelRuntimeConfig()
        card.total_kv_blocks = model.num_blocks
        card.max_num_seqs = model.max_batch_size
        card.max_num_batched_tokens = model.max_num_tokens
        card.context_length = model.max_seq_len
        card.kv_event_publishing_enabled = config.tells_kv_events
        card.enable_local_indexer = True
        card.tool_call_parser = config.tool_call_parser
        card.reasoning_parser = config.reasoning_parser
        model_type, worker_type, needs = _registration(config) if is_routed else _UNROUTED
        await register_model(
            ModelInput.Tokens,
            model_type,
            self.endpoint,
            config.model,
            config.model_name,
            worker_type=worker_type,
            needs=needs,
            kv_cache_block_size=model.block_size,
            runtime_config=card,
            custom_template_path=config.custom_jinja_template,
            ignore_weights=True,
        )

    def stop_on_signals(
        self, drain: Callable[[], Awaitable[None]], leave: Callable[[], Awaitable[None]]
    ) -> None:
        """SIGTERM and SIGINT: leave discovery and at once `leave`, wherever else work comes from; let running
        requests end, `drain`, then `serve` returns.
        """

        async def stop() -> None:
            self._told_to_stop = True
            await drain()

        install_signal_handlers(
            asyncio.get_running_loop(), self._runtime, [self.endpoint, _Left(leave)], drain_callback=stop
        )

    async def serve(self, generate: Generate, describe: dict[str, Any]) -> None:
        """Answer requests until the runtime is shut down. `describe` answers the other stage's question."""
        await self.endpoint.serve_endpoint(
            as_dynamo_handler(generate, describe),
            graceful_shutdown=True,
            metrics_labels=[("model", self._config.model_name)],
            health_check_payload={DESCRIBE: True},
        )

    def shutdown(self) -> None:
        self._runtime.shutdown()


class _Left:
    """An endpoint to Dynamo's shutdown, as far as leaving it goes: all are left first, and together."""

    def __init__(self, leave: Callable[[], Awaitable[None]]) -> None:
        self._leave = leave

    async def unregister_endpoint_instance(self) -> None:
        await self._leave()


def _registration(config: WorkerConfig) -> tuple[Any, Any, list[list[Any]]]:
    """(model type, worker type, needs). A first stage looks like a whole worker to the frontend, which is
    what makes it route requests by this worker's cache and leave the second stage alone.
    """
    served = ModelType.Empty
    for name in config.endpoint_types.split(","):
        served = served | _MODEL_TYPES[name.strip()]
    if config.role is Role.AGG or config.strategy is not Strategy.ROUTER:
        return served, WorkerType.Aggregated, []
    if config.role is Role.PREFILL:
        return ModelType.Prefill, WorkerType.Prefill, [[WorkerType.Decode]]
    return served, WorkerType.Decode, [[WorkerType.Prefill]]


#: A card without which no KvRouter listens to this worker's cache events. With this worker type the frontend neither
#: routes to it nor takes it for a model that is served when the first stage is gone; and routers listen, as they do
#: not to WorkerType.Decode. All measured (docs/log.md); the worker may do prefill or decode.
_UNROUTED: tuple[Any, Any, list[list[Any]]] = (
    ModelType.Empty,
    WorkerType.Prefill,
    [[WorkerType.Aggregated]],
)

_MODEL_TYPES = {"chat": ModelType.Chat, "completions": ModelType.Completions, "none": ModelType.Empty}
