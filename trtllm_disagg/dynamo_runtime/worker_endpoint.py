"""Dynamo's runtime in one role term: this worker's endpoints, and the other workers'."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo.runtime import DistributedRuntime

from trtllm_disagg.admin.commands import DescribedInstance
from trtllm_disagg.config.settings import endpoint_of, parse_endpoint_id
from trtllm_disagg.config.worker_config import Role, WorkerConfig, flag_of
from trtllm_disagg.dynamo_runtime.advertised import Route
from trtllm_disagg.dynamo_runtime.discovery import Clients, DynamoDirectory, described
from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What this worker's model card tells the frontend about the engine."""

    block_size: int
    num_blocks: int
    max_batch_size: int
    max_num_tokens: int
    #: None: the frontend uses the model's limit.
    max_seq_len: int | None
    #: Number of attention-DP ranks; each has its own cache.
    num_ranks: int = 1


class Runtime:
    """Lives until `shutdown`, or until its lease in discovery ends."""

    def __init__(self, config: WorkerConfig, dynamo: Any = None, clients: Clients | None = None) -> None:
        """`dynamo`: Dynamo's runtime; None: a new one. `clients`: of other workers; None: they end with this runtime.
        Raises ConfigError if discovery cannot be reached.
        """
        self._config = config
        self._dynamo = dynamo or _open(config)
        #: This worker's endpoints by id: where frontends call it while it is a first stage, and where peers call it.
        #: They are one on a worker that may not be switched.
        self.own = {
            each: self.endpoint(each) for each in (config.frontend_endpoint_id, config.worker_endpoint_id)
        }
        #: Equal at both endpoints.
        self.instance_id: int = self.endpoint_for_frontends.connection_id()
        #: This worker's description.
        self.describe: Callable[[], dict[str, Any]] = dict
        self.clients = clients or Clients(config, self._dynamo)
        self._is_shut_down = False

    @property
    def endpoint_for_frontends(self) -> Any:
        return self.own[self._config.frontend_endpoint_id]

    @property
    def endpoint_for_workers(self) -> Any:
        return self.own[self._config.worker_endpoint_id]

    def endpoint(self, endpoint_id: str) -> Any:
        return self._dynamo.endpoint(parse_endpoint_id(endpoint_id).dotted)

    def register_engine_route(self, path: str, route: Route) -> None:
        """Answer POST /engine/`path` at the system port."""
        self._dynamo.register_engine_route(path, route)

    async def wait_for_second_stage(self, endpoint_id: str) -> None:
        """Wait until an instance is listed at an endpoint."""
        await (await self.client(endpoint_id)).wait_for_instances()

    async def stage(self, endpoint_id: str) -> DynamoDirectory:
        """The instances at an endpoint that discovery lists at each use."""
        return DynamoDirectory(await self.client(endpoint_id))

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]:
        """The current descriptions of the instances at an endpoint, without silent ones."""
        client = await self.client(endpoint_id)
        answers = await asyncio.gather(*(described(client, i) for i in client.instance_ids()))
        return [answer for answer in answers if answer is not None]

    async def list_instances(self) -> list[DescribedInstance]:
        """Every worker that this namespace's requests could reach, with its current description."""
        config = self._config
        usual = (endpoint_of(config.namespace, role) for role in (None, Role.PREFILL, Role.DECODE))
        # First the endpoints that have clients anyway.
        first = [each for each in (config.peer_endpoint_id, config.endpoint_id) if each]
        endpoint_ids = dict.fromkeys([*first, config.worker_endpoint_id, config.frontend_endpoint_id, *usual])
        return await self.clients.list_instances(endpoint_ids, self.instance_id, self.describe)

    async def client(self, endpoint_id: str) -> Any:
        """An endpoint's only client: each watches the discovery directory, and a user may have 128 watches."""
        return await self.clients.of(endpoint_id)

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._dynamo.shutdown()


def _open(config: WorkerConfig) -> Any:
    """Raises ConfigError if discovery cannot be reached, for example `kubernetes` outside a pod."""
    backend = config.discovery_backend
    if backend == "etcd":
        where = os.environ.get("ETCD_ENDPOINTS", "http://localhost:2379")
        log.info("looking for etcd at %s (--discovery-backend file needs none, on one machine)", where)
    try:
        loop = asyncio.get_running_loop()
        return DistributedRuntime(loop, backend, config.request_plane, event_plane=config.event_plane)
    except Exception as error:
        raise ConfigError(f"{flag_of('discovery_backend')} {backend}: {error}") from error
