"""A worker's place in a Dynamo deployment: its endpoint, its registration, its end."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dynamo.common.utils.graceful_shutdown import get_grace_period_seconds
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo.runtime import DistributedRuntime

from trtllm_disagg.commands import DescribedInstance
from trtllm_disagg.config.settings import endpoint_of, parse_endpoint_id
from trtllm_disagg.config.worker_config import Role, WorkerConfig, flag_of
from trtllm_disagg.dynamo_runtime.advertised import NOTHING, Advertised
from trtllm_disagg.dynamo_runtime.discovery import DynamoDirectory, KvOverlaps, described, list_instances
from trtllm_disagg.dynamo_runtime.handler import (
    FirstTokens,
    HandleCommand,
    Probe,
    answers_by_itself,
    as_dynamo_handler,
    health_check_payload,
)
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.types import Generate

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the frontend's model card says about this worker's engine."""

    block_size: int
    num_blocks: int
    max_batch_size: int
    max_num_tokens: int
    #: None: the frontend reads the model's own.
    max_seq_len: int | None
    #: Ranks of attention DP, each with a cache of its own.
    num_ranks: int = 1


_SYSTEM_PORT, _SYSTEM_HOST = "DYN_SYSTEM_PORT", "DYN_SYSTEM_HOST"


def require_system_port(environ: Mapping[str, str]) -> None:
    """Raise ConfigError when the port of /health and /metrics is wanted and taken. Dynamo opens it, and when it cannot,
    it goes on without and says so in its log: a worker without metrics is not what was asked for.
    """
    port = environ.get(_SYSTEM_PORT, "")
    if not port.isdecimal():
        return  # none is wanted, or Dynamo refuses it
    if int(port) > 65535:
        raise ConfigError.bad_value(_SYSTEM_PORT, port, "a port, 65535 at most")
    host = environ.get(_SYSTEM_HOST) or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family).close()
    except OSError as error:
        allowed = f"a port on {host} ({_SYSTEM_HOST}) that can be listened on ({error.strerror or error})"
        raise ConfigError.bad_value(_SYSTEM_PORT, port, allowed) from None


class Runtime:
    """This worker in Dynamo's runtime; its creator calls `shutdown`."""

    def __init__(self, config: WorkerConfig, advertised: Advertised = NOTHING) -> None:
        """Raises ConfigError for a --health-check-payload that is no request."""
        self._config = config
        self._advertised = advertised
        self._health_check = health_check_payload(config.health_check_payload)
        self._runtime = _open(config)
        #: Where workers of the other role call this one, and where frontends do while it is a first stage.
        self.peer = self._endpoint(config.peer_endpoint_id)
        self.front = self._endpoint(config.front_endpoint_id)
        #: The same at both.
        self.instance_id: int = self.front.connection_id()
        self._handler: Callable[..., Any] | None = None
        #: By their ids; each is served until the end, whether it is in discovery or not.
        self._serving: dict[str, asyncio.Future[None]] = {}
        #: Those that are in discovery now.
        self._listed: list[Any] = []
        self._clients: dict[str, Any] = {}
        self._has_left = self._is_shut_down = False

    async def second_stage(self, endpoint_id: str) -> DynamoDirectory | None:
        """The instances of the other stage, once there is one; None when told to stop before."""
        client = await self._client(endpoint_id)
        log.info("waiting for the second stage at %s", endpoint_id)
        try:
            await client.wait_for_instances()
        except Exception:
            if self._is_shut_down:
                return None
            raise
        return DynamoDirectory(client)

    async def stage(self, endpoint_id: str) -> DynamoDirectory:
        """The same without waiting: the instances that are there when a request needs one."""
        return DynamoDirectory(await self._client(endpoint_id))

    def overlaps(self, endpoint_id: str, block_size: int) -> KvOverlaps:
        """What the instances at an endpoint have cached of a prompt."""
        return KvOverlaps(self._endpoint(endpoint_id), block_size)

    async def partners(self, endpoint_id: str) -> list[dict[str, Any]]:
        """The descriptions of the instances at an endpoint now; without those that do not answer."""
        client = await self._client(endpoint_id)
        answers = [await described(client, instance_id) for instance_id in client.instance_ids()]
        return [answer for answer in answers if answer is not None]

    async def list_instances(self) -> list[DescribedInstance]:
        """Every worker that requests of this namespace could reach, as it describes itself now."""
        config = self._config
        usual = (endpoint_of(config.namespace, role) for role in (None, Role.PREFILL, Role.DECODE))
        endpoint_ids = {config.front_endpoint_id, config.peer_endpoint_id, *usual}
        return await list_instances(config, self._runtime, endpoint_ids)

    async def _client(self, endpoint_id: str) -> Any:
        """One for each endpoint: every one watches the discovery directory, and a user may have 128 watches."""
        if endpoint_id not in self._clients:
            self._clients[endpoint_id] = await self._endpoint(endpoint_id).client()
        return self._clients[endpoint_id]

    def _endpoint(self, endpoint_id: str) -> Any:
        return self._runtime.endpoint(parse_endpoint_id(endpoint_id).dotted)

    async def unregister(self) -> None:
        """Frontends forget this worker. Requests that they have sent, or are just sending, are still answered: first
        the model goes, then, when all have heard of it, the instance.
        """
        await unregister_model(self.front)
        await asyncio.sleep(get_grace_period_seconds())
        if self.front in self._listed:
            self._listed.remove(self.front)
            await self.front.unregister_endpoint_instance()

    async def register(self, model: ServedModel) -> None:
        """Make this worker known to frontends, unless it has left. It serves."""
        if self._has_left:
            return
        await self._list(self._config.front_endpoint_id, self.front)
        await self._put_card(model, self.front, _registration(self._config), self._config.publish_kv_events)

    async def register_for_peers(self, model: ServedModel) -> None:
        """Have the KV routers of the other role listen to this worker, unless it has left. Frontends send it nothing
        for that.
        """
        if self._has_left:
            return
        await self._put_card(model, self.peer, _UNROUTED, True)

    async def unregister_for_peers(self) -> None:
        await unregister_model(self.peer)

    async def _put_card(
        self, model: ServedModel, endpoint: Any, kind: tuple[Any, Any, list[list[Any]]], tells_events: bool
    ) -> None:
        config = self._config
        card = ModelRuntimeConfig()
        card.total_kv_blocks = model.num_blocks
        card.max_num_seqs = model.max_batch_size
        card.max_num_batched_tokens = model.max_num_tokens
        if model.max_seq_len is not None:
            card.context_length = model.max_seq_len
        card.data_parallel_size = model.num_ranks
        card.kv_event_publishing_enabled = tells_events
        card.enable_local_indexer = True
        if endpoint is self.front:
            card.kv_state_endpoint = config.kv_state_endpoint
        self._advertised.put_on(card)
        model_type, worker_type, needs = kind
        await register_model(
            ModelInput.Tokens,
            model_type,
            endpoint,
            config.model,
            config.model_name,
            worker_type=worker_type,
            needs=needs,
            kv_cache_block_size=model.block_size,
            runtime_config=card,
            custom_template_path=config.custom_jinja_template,
            ignore_weights=True,
            router_config=self._advertised.router,
        )

    async def leave(self) -> None:
        """Out of discovery, wherever this worker is listed, for good. What runs here runs on, also what is just being
        sent.
        """
        self._has_left = True
        leaving = [endpoint.unregister_endpoint_instance() for endpoint in self._listed]
        self._listed.clear()
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.warning("discovery cannot be told that this worker leaves: %s", outcome)

    async def serve(
        self,
        generate: Generate,
        describe: Callable[[], dict[str, Any]],
        handle_command: HandleCommand,
        longest_prompt: float = math.inf,
        probe: Probe = answers_by_itself,
    ) -> None:
        """Answer requests until the runtime is shut down. `describe` answers the question of the other stage,
        `handle_command` the control commands.
        """
        # The tokens that a prefill worker streams come from a decode worker, and one worker put them together.
        pushes = self._config.role is Role.PREFILL
        self._handler = as_dynamo_handler(
            generate,
            describe,
            handle_command,
            longest_prompt,
            probe,
            pushes=pushes,
            first_tokens=await self._first_tokens(),
        )
        if self._config.may_switch:
            await self._list(self._config.peer_endpoint_id, self.peer)
        else:
            await self._list(self._config.front_endpoint_id, self.front)
        # Another endpoint may be served from later on, and has requests of its own to end.
        while running := [each for each in self._serving.values() if not each.done()]:
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in ended:
                each.result()

    async def _first_tokens(self) -> FirstTokens | None:
        """None with Dynamo before 1.6, and for workers without tokens of their own."""
        source_for = getattr(self.front, "first_token_source", None)
        if source_for is None:
            return None
        _, worker_type, _ = _registration(self._config)
        source: FirstTokens | None = await source_for(worker_type)
        return source

    async def list_again(self) -> None:
        """For a discovery that has forgotten this worker. A listed endpoint is gone for a moment only."""
        for endpoint in list(self._listed):
            with suppress(Exception):
                await endpoint.unregister_endpoint_instance()
            await endpoint.register_endpoint_instance()

    async def _list(self, endpoint_id: str, endpoint: Any) -> None:
        """Answer requests at an endpoint, and say so in discovery."""
        if endpoint in self._listed:
            return
        self._listed.append(endpoint)
        if endpoint_id in self._serving:
            await endpoint.register_endpoint_instance()
            return
        self._serving[endpoint_id] = asyncio.ensure_future(
            endpoint.serve_endpoint(
                self._handler,
                graceful_shutdown=True,
                metrics_labels=[("model", self._config.model_name)],
                health_check_payload=self._health_check,
            )
        )

    def shutdown(self) -> None:
        self._is_shut_down = True
        self._runtime.shutdown()


def _open(config: WorkerConfig) -> Any:
    """Raises ConfigError where the discovery cannot be had: outside of a pod, for one."""
    try:
        return DistributedRuntime(
            asyncio.get_running_loop(),
            config.discovery_backend,
            config.request_plane,
            event_plane=config.event_plane,
        )
    except Exception as error:
        raise ConfigError(f"{flag_of('discovery_backend')} {config.discovery_backend}: {error}") from error


class Registration:
    """Whether the frontend knows this worker. To do what is done already changes nothing.

    A worker that it does not know may be known to the KV routers of the other role instead (`tells_peers`). Never
    both: a model of which both roles say so is not served (measured, docs/log.md).
    """

    def __init__(self, runtime: Runtime, model: ServedModel, *, tells_peers: bool) -> None:
        self._runtime = runtime
        self._model = model
        self._tells_peers = tells_peers
        self._there = False
        self._heard_by_peers = False

    @property
    def is_there(self) -> bool:
        return self._there

    async def enter(self) -> None:
        if not self._there:
            if self._heard_by_peers:
                await self._runtime.unregister_for_peers()
                self._heard_by_peers = False
            await self._runtime.register(self._model)
            self._there = True

    async def leave(self) -> None:
        if self._there:
            await self._runtime.unregister()
            self._there = False
        await self.stand_by()

    async def renew(self) -> None:
        """All that discovery should know, again."""
        await self._runtime.list_again()
        if self._there:
            with suppress(Exception):
                await unregister_model(self._runtime.front)
            await self._runtime.register(self._model)
        if self._heard_by_peers:
            with suppress(Exception):
                await self._runtime.unregister_for_peers()
            await self._runtime.register_for_peers(self._model)

    async def stand_by(self) -> None:
        """As a second stage."""
        if self._tells_peers and not self._heard_by_peers:
            await self._runtime.register_for_peers(self._model)
            self._heard_by_peers = True


def _registration(config: WorkerConfig) -> tuple[Any, Any, list[list[Any]]]:
    """(model type, worker type, needs). A first stage looks like a whole worker to the frontend, which is
    what makes it route requests by this worker's cache and leave the second stage alone.
    """
    served = ModelType.Empty
    for name in config.endpoint_types.split(","):
        served = served | _MODEL_TYPES[name.strip()]
    if config.role is Role.AGG or config.strategy_spec.entry_role is not None:
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
