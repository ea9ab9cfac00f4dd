"""A worker in a Dynamo deployment: its endpoints, their entries in discovery, and its registration with frontends."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynamo.common.token_budget import TokenBudget, publish_token_budget
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

from trtllm_disagg.admin.commands import DescribedInstance
from trtllm_disagg.config.settings import endpoint_of, names_of_endpoint_types, parse_endpoint_id
from trtllm_disagg.config.worker_config import Role, WorkerConfig, flag_of
from trtllm_disagg.dynamo_runtime.advertised import Advertised, Taints
from trtllm_disagg.dynamo_runtime.discovery import (
    Clients,
    DiscoveryFiles,
    DynamoDirectory,
    KvOverlaps,
    described,
)
from trtllm_disagg.dynamo_runtime.handler import (
    FirstTokens,
    FirstTokensOfTerm,
    HandleCommand,
    Probe,
    ReleasedAtEnd,
    answers_by_itself,
    as_dynamo_handler,
    health_check_payload,
)
from trtllm_disagg.engine.readers import EngineReaders
from trtllm_disagg.errors import ConfigError, PeerUnavailableError
from trtllm_disagg.types import Generate

log = logging.getLogger(__name__)

#: For a worker to see the others, for frontends to see its card, and to make the routers of a namespace that has just
#: got both roles: until then they refuse its requests.
_FRONTENDS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What this worker's model card tells the frontend about its engine."""

    block_size: int
    num_blocks: int
    max_batch_size: int
    max_num_tokens: int
    #: None: the frontend takes the model's own limit.
    max_seq_len: int | None
    #: Number of attention-DP ranks; each has its own cache.
    num_ranks: int = 1


class Runtime:
    """This worker in Dynamo's runtime; serving lasts until `shutdown`."""

    def __init__(
        self,
        config: WorkerConfig,
        advertised: Advertised | None = None,
        runtime: Any = None,
        clients: Clients | None = None,
    ) -> None:
        """`runtime`: Dynamo's; None: a new one. `clients`: of other workers; None: they end with this runtime. Raises
        ConfigError when --health-check-payload is no valid request.
        """
        self._config = config
        self._advertised = advertised or Advertised()
        self._health_check = health_check_payload(config.health_check_payload)
        self._runtime = runtime or _open(config)
        #: Where peers call this worker, and where frontends call it while it is a first stage. May be one endpoint.
        self.endpoint_for_workers = self._endpoint(config.worker_endpoint_id)
        self.endpoint_for_frontends = self._endpoint(config.frontend_endpoint_id)
        self._taints = Taints(self._runtime, self.endpoint_for_frontends, self._advertised.taints)
        #: The same at both endpoints.
        self.instance_id: int = self.endpoint_for_frontends.connection_id()
        self._handler: Callable[..., Any] | None = None
        #: What this worker says of itself.
        self._describe: Callable[[], dict[str, Any]] = dict
        #: Endpoint id -> the task that serves it; it runs until the end, whether the endpoint is in discovery or not.
        self._serving: dict[str, asyncio.Future[None]] = {}
        #: Ids of the endpoints without which this worker is of no use now.
        self._needed: set[str] = set()
        #: Set whenever one of these tasks has ended.
        self._has_ended = asyncio.Event()
        #: Endpoint -> its id, where this worker is in discovery now.
        self._listed: dict[Any, str] = {}
        self._clients = clients or Clients(config, self._runtime)
        self._is_over = asyncio.Event()
        self._has_left = self._is_shut_down = False
        self._has_card_for_peers = False
        #: The client of the endpoint for frontends.
        self._at_endpoint: Any = None
        #: What frontends know of this worker; None while they do not know it.
        self._at_frontends: ServedModel | None = None
        #: The endpoint whose card keeps new requests from this namespace.
        self._closed: Any = None

    async def wait_for_second_stage(self, endpoint_id: str) -> bool:
        """Wait until an instance is listed at an endpoint. False when this worker was shut down before."""
        client = await self._clients.of(endpoint_id)
        waiting = asyncio.ensure_future(client.wait_for_instances())
        over = asyncio.ensure_future(self._is_over.wait())
        await asyncio.wait({waiting, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if not self._is_shut_down:
            await waiting
        waiting.cancel()
        return not self._is_shut_down

    async def stage(self, endpoint_id: str) -> DynamoDirectory:
        """The instances at an endpoint, as discovery lists them at each use."""
        return DynamoDirectory(await self._clients.of(endpoint_id))

    def overlaps(self, endpoint_id: str, block_size: int) -> KvOverlaps:
        """Tells how much of a prompt the instances at an endpoint have cached."""
        return self._clients.overlaps(endpoint_id, block_size)

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]:
        """The descriptions of the instances at an endpoint now, without instances that do not answer."""
        client = await self._clients.of(endpoint_id)
        answers = await asyncio.gather(*(described(client, i) for i in client.instance_ids()))
        return [answer for answer in answers if answer is not None]

    async def list_instances(self) -> list[DescribedInstance]:
        """Every worker that requests of this namespace could reach, with its description of now."""
        config = self._config
        usual = (endpoint_of(config.namespace, role) for role in (None, Role.PREFILL, Role.DECODE))
        # First those that it has clients of anyway.
        first = [each for each in (config.peer_endpoint_id, config.endpoint_id) if each]
        endpoint_ids = dict.fromkeys([*first, config.worker_endpoint_id, config.frontend_endpoint_id, *usual])
        return await self._clients.list_instances(endpoint_ids, self.instance_id, self._describe)

    def _endpoint(self, endpoint_id: str) -> Any:
        return self._runtime.endpoint(parse_endpoint_id(endpoint_id).dotted)

    async def unregister(self) -> None:
        """Remove this worker from frontends. Requests that they have sent, or are just sending, are still answered: the
        model is removed first, and the instance after the grace period in which all frontends learn of that.
        """
        await unregister_model(self.endpoint_for_frontends)
        self._at_frontends = None
        if self._config.may_switch:
            self._needed.discard(self._config.frontend_endpoint_id)
        await asyncio.sleep(get_grace_period_seconds())
        if self.endpoint_for_frontends in self._listed:
            await self.endpoint_for_frontends.unregister_endpoint_instance()
            self._listed.pop(self.endpoint_for_frontends, None)

    async def register(self, model: ServedModel) -> None:
        """Make this worker, which serves already, known to frontends, unless it has left. Raises what Dynamo raises."""
        if self._has_left:
            return
        endpoint_id = self._config.frontend_endpoint_id
        await self._list(endpoint_id, self.endpoint_for_frontends)
        _, _, needs = kind = _registration(self._config)
        self._at_endpoint = await self._clients.of(endpoint_id)  # a new client lists no instance at first
        pause = _FRONTENDS_SECONDS if needs else 0
        await asyncio.sleep(pause)
        try:
            if needs and self._is_alone():
                await self._close_namespace(model)
                await asyncio.sleep(pause)
            await self._put_card(model, self.endpoint_for_frontends, kind, self._config.publish_kv_events)
            self._at_frontends = model
            await asyncio.sleep(pause)
        finally:
            await self.open_namespace()
        if failure := self._failure_at(endpoint_id):
            raise failure
        self._needed.add(endpoint_id)

    async def register_for_peers(self, model: ServedModel) -> None:
        """Have the KV routers of the other role listen to this worker's cache events, unless it has left."""
        if self._has_left:
            return
        self._has_card_for_peers = True
        await self._put_card(model, self.endpoint_for_workers, _UNROUTED, True)
        await self._remove_card_if_gone()

    async def _remove_card_if_gone(self) -> None:
        if self._has_left:
            await self.unregister_for_peers()

    async def unregister_for_peers(self) -> None:
        await unregister_model(self.endpoint_for_workers)
        self._has_card_for_peers = False

    async def _put_card(
        self,
        model: ServedModel,
        endpoint: Any,
        kind: tuple[Any, Any, list[list[Any]]],
        publishes_events: bool,
    ) -> None:
        if self._has_left:  # since the caller has looked
            return
        config = self._config
        card = ModelRuntimeConfig()
        card.total_kv_blocks = model.num_blocks
        card.max_num_seqs = model.max_batch_size
        card.max_num_batched_tokens = model.max_num_tokens
        if model.max_seq_len is not None:
            card.context_length = model.max_seq_len
            # The frontend refuses a longer prompt with 400, also where the answer would be a stream, begun with 200.
            publish_token_budget(card, TokenBudget(model.max_seq_len, True, False))
        card.data_parallel_size = model.num_ranks
        card.kv_event_publishing_enabled = publishes_events
        card.enable_local_indexer = True
        if endpoint is self.endpoint_for_frontends:
            card.kv_state_endpoint = config.kv_state_endpoint
            self._taints.put_on(card)
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

    async def hide(self, *, with_namespace: bool) -> bool:
        """Have frontends send nothing more here, and still reach it for what they have begun to send: they drop
        a request whose worker leaves discovery before it answers. Returns whether they knew this worker.
        """
        if (model := self._at_frontends) is None:
            return False
        if with_namespace or self._is_alone():
            await self._close_namespace(model)
        else:
            await unregister_model(self.endpoint_for_frontends)
        return True

    def _is_alone(self) -> bool:
        """Whether frontends know no other worker of its kind in this namespace. `register` has made the client."""
        return [*self._at_endpoint.instance_ids()] == [self.instance_id]

    async def _close_namespace(self, model: ServedModel) -> None:
        """Other namespaces of the model get all new requests, while one endpoint has a card of a type that no worker
        here routes by, with needs that no worker meets (docs/log/dynamo.md).
        """
        at = parse_endpoint_id(self._config.frontend_endpoint_id).dotted
        self._closed = self._runtime.endpoint(f"{at}_closed")
        _, _, needs = _registration(self._config)
        kind = WorkerType.Aggregated if needs else WorkerType.Prefill
        await self._put_card(model, self._closed, (ModelType.Empty, kind, [[WorkerType.Encode]]), False)

    async def open_namespace(self) -> None:
        """For a worker that comes into it while this one still finishes requests, if this one has closed it."""
        if self._closed is not None:
            await unregister_model(self._closed)
            self._closed = None

    async def leave(self) -> None:
        """Remove this worker from discovery, for good. Requests that run, or are being sent, are still answered."""
        self._has_left = True
        if self._has_card_for_peers:
            # First: a frontend serves no model while one of its cards has no instance.
            try:
                await self.unregister_for_peers()
            except Exception as error:
                log.warning("this worker's card cannot be removed from discovery: %s", error)
        removals = [endpoint.unregister_endpoint_instance() for endpoint in self._listed]
        self._listed.clear()
        for outcome in await asyncio.gather(*removals, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.warning("this worker cannot be removed from discovery: %s", outcome)

    async def serve(
        self,
        generate: Generate,
        describe: Callable[[], dict[str, Any]],
        handle_command: HandleCommand,
        longest_prompt: float = math.inf,
        probe: Probe = answers_by_itself,
    ) -> None:
        """Answer requests until the runtime is shut down. `describe`: what other workers ask for."""
        # Cheaper than to be asked for each chunk. But a decode worker, whose chunks another worker may relay, makes
        # fewer of them when it is asked.
        pushes = self._config.role is not Role.DECODE or not self._config.strategy_spec.is_worker_side
        self._describe = describe
        first_tokens = await self._first_tokens()
        handler = as_dynamo_handler(
            generate,
            describe,
            handle_command,
            longest_prompt,
            probe,
            pushes=pushes,
            first_tokens=first_tokens,
        )
        served = ReleasedAtEnd(handler, pushes=pushes)
        self._handler = served.function
        try:
            await self._serve_until_shutdown()
        finally:
            served.release()
            if first_tokens is not None:
                first_tokens.release()

    async def _serve_until_shutdown(self) -> None:
        if self._config.may_switch:
            endpoint_id, endpoint = self._config.worker_endpoint_id, self.endpoint_for_workers
        else:
            endpoint_id, endpoint = self._config.frontend_endpoint_id, self.endpoint_for_frontends
        self._needed.add(endpoint_id)
        await self._list(endpoint_id, endpoint)
        # `_list` may add an endpoint meanwhile, which has to finish its own requests, too.
        while not all(each.done() for each in self._serving.values()):
            await self._has_ended.wait()
            self._has_ended.clear()
            for endpoint_id in self._needed:
                if failure := self._failure_at(endpoint_id):
                    raise failure

    def _failure_at(self, endpoint_id: str) -> BaseException | None:
        """Why the endpoint is not served any more."""
        serving = self._serving.get(endpoint_id)
        if serving is None or not serving.done() or serving.cancelled():
            return None
        return serving.exception()

    async def _first_tokens(self) -> FirstTokensOfTerm | None:
        """None with Dynamo before 1.6, and for worker types that have none."""
        source_for = getattr(self.endpoint_for_frontends, "first_token_source", None)
        if source_for is None:
            return None
        _, worker_type, _ = _registration(self._config)
        source: FirstTokens | None = await source_for(worker_type)
        return None if source is None else FirstTokensOfTerm(source)

    async def list_again(self) -> None:
        """Enter discovery again, which may have dropped this worker. An endpoint still listed is gone for a moment."""
        for endpoint, endpoint_id in list(self._listed.items()):
            with suppress(Exception):
                await endpoint.unregister_endpoint_instance()
            if not self._has_left:
                await self._enter(endpoint_id, endpoint)

    def listed_at(self) -> list[str]:
        """The ids of the endpoints at which this worker is in discovery now."""
        return [] if self._is_shut_down else list(self._listed.values())

    async def _enter(self, endpoint_id: str, endpoint: Any) -> None:
        await endpoint.register_endpoint_instance()
        self._listed[endpoint] = endpoint_id
        if self._has_left:  # meanwhile
            await self.leave()

    async def _list(self, endpoint_id: str, endpoint: Any) -> None:
        """Answer requests at an endpoint, and enter it into discovery, unless this worker has left. Raises
        PeerUnavailableError for an endpoint that failed before: Dynamo serves none a second time.
        """
        if failure := self._failure_at(endpoint_id):
            raise PeerUnavailableError(
                f"this worker cannot be called at {endpoint_id} before it is restarted; it failed there: {failure}"
            )
        if endpoint in self._listed or self._has_left:
            return
        if endpoint_id in self._serving:
            await self._enter(endpoint_id, endpoint)
            return
        self._listed[endpoint] = endpoint_id
        self._serving[endpoint_id] = serving = asyncio.ensure_future(
            endpoint.serve_endpoint(
                self._handler,
                graceful_shutdown=True,
                metrics_labels=[(label, self._config.model_name) for label in ("model", "model_name")],
                health_check_payload=self._health_check,
            )
        )
        serving.add_done_callback(partial(self._on_end, endpoint_id, endpoint))

    def _on_end(self, endpoint_id: str, endpoint: Any, _: object) -> None:
        if failure := self._failure_at(endpoint_id):
            log.error("this worker cannot be called at %s: %s", endpoint_id, failure)
            self._listed.pop(endpoint, None)
        self._has_ended.set()

    @property
    def was_dropped(self) -> bool:
        """Dynamo has ended its runtime by itself, as when the lease in etcd is over: after a cut of the network,
        or when etcd starts empty.
        """
        return not self._is_shut_down

    def shutdown(self) -> None:
        self._is_shut_down = True
        self._is_over.set()
        self._runtime.shutdown()


def _open(config: WorkerConfig) -> Any:
    """Raises ConfigError when the discovery cannot be reached: `kubernetes` outside of a pod, for example."""
    backend = config.discovery_backend
    if backend == "etcd":
        where = os.environ.get("ETCD_ENDPOINTS", "http://localhost:2379")
        log.info("looking for etcd at %s (--discovery-backend file needs none, on one machine)", where)
    try:
        loop = asyncio.get_running_loop()
        return DistributedRuntime(loop, backend, config.request_plane, event_plane=config.event_plane)
    except Exception as error:
        raise ConfigError(f"{flag_of('discovery_backend')} {backend}: {error}") from error


class DynamoRegistration:
    """Registers this worker with frontends, or with the KV routers of the other role (`tells_peers`), never with both:
    a frontend does not serve a model that both roles registered (docs/log/dynamo.md). All methods are idempotent.
    """

    def __init__(
        self, runtime: Runtime, model: ServedModel, readers: EngineReaders, *, tells_peers: bool
    ) -> None:
        self._runtime = runtime
        self._readers = readers
        self._model = model
        self._tells_peers = tells_peers
        self._files = DiscoveryFiles(runtime.instance_id)
        self.is_at_frontends = False
        self._is_at_peers = False
        #: A renewal has failed on its way: some entries are still missing.
        self._is_half_renewed = False

    async def enter(self) -> None:
        if not self.is_at_frontends:
            if self._is_at_peers:
                await self._runtime.unregister_for_peers()
                self._is_at_peers = False
            await self._runtime.register(self._model)
            self.is_at_frontends = True

    async def leave(self) -> None:
        if self.is_at_frontends:
            await self._runtime.unregister()
            self.is_at_frontends = False
        await self.stand_by()

    async def is_lost(self) -> bool:
        return self._is_half_renewed or await asyncio.to_thread(
            self._files.has_lost, self._runtime.listed_at()
        )

    async def renew(self) -> None:
        """Make every current entry in discovery again."""
        self._is_half_renewed = True
        await self._runtime.list_again()
        self._readers.renew()
        if self.is_at_frontends:
            with suppress(Exception):
                await unregister_model(self._runtime.endpoint_for_frontends)
            await self._runtime.register(self._model)
        if self._is_at_peers:
            with suppress(Exception):
                await self._runtime.unregister_for_peers()
            await self._runtime.register_for_peers(self._model)
        self._is_half_renewed = False

    async def stand_by(self) -> None:
        """Be a second stage, which frontends do not call."""
        if self._tells_peers and not self._is_at_peers:
            await self._runtime.register_for_peers(self._model)
            self._is_at_peers = True


def _registration(config: WorkerConfig) -> tuple[Any, Any, list[list[Any]]]:
    """(model type, worker type, needs). A first stage registers as an aggregated worker, so the frontend routes
    requests by this worker's cache and calls no second stage.
    """
    served = ModelType.Empty
    for name in names_of_endpoint_types(config.endpoint_types):
        served = served | _MODEL_TYPES[name]
    if config.role is Role.AGG or config.strategy_spec.entry_role is not None:
        return served, WorkerType.Aggregated, []
    if config.role is Role.PREFILL:
        return ModelType.Prefill, WorkerType.Prefill, [[WorkerType.Decode]]
    return served, WorkerType.Decode, [[WorkerType.Prefill]]


#: The card of a second stage: without a card no KvRouter listens to its cache events. With this worker type the
#: frontend neither routes requests to it nor counts the model as served when the first stage is gone, and KvRouters
#: listen to it, unlike to WorkerType.Decode. All measured, for both roles (docs/log/dynamo.md).
_UNROUTED: tuple[Any, Any, list[list[Any]]] = (
    ModelType.Empty,
    WorkerType.Prefill,
    [[WorkerType.Aggregated]],
)

_MODEL_TYPES = {"chat": ModelType.Chat, "completions": ModelType.Completions, "none": ModelType.Empty}
