"""Queues requests for prefill workers on NATS JetStream (decision 12). The other modules are imported only with a
queue: NATS' client and its aiohttp are a third of a worker's imports.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import QueueMetrics, expose, registry_of
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.queued import PrefillQueue
from trtllm_disagg.handlers.selection import RoundRobin, Selection

if TYPE_CHECKING:
    from trtllm_disagg.prefill_queue.broker import Broker, QueueLimits
    from trtllm_disagg.prefill_queue.taking import Taking


class WorkerQueue:
    """No queue: a worker's requests do not wait."""

    async def for_requests(self, peers: Peers, runtime: Runtime) -> PrefillQueue | None:
        """The queue of this worker's requests; None without one."""
        return None

    async def start(self, engine: Engine, instance_id: int, endpoint: Any) -> None:
        """Publish gauges on /metrics of `endpoint`; on a prefill worker, start taking tickets for `engine`."""

    async def leave(self) -> None:
        """Take no further ticket, and wait for expected calls."""

    async def aclose(self) -> None: ...


class NatsQueue(WorkerQueue):
    def __init__(self, config: WorkerConfig, broker: Broker) -> None:
        from trtllm_disagg.prefill_queue.asking import Asking

        self._config = config
        self._broker = broker
        self.asking = Asking(broker, config.queue_timeout)
        self._taking: Taking | None = None
        self._has_left = False
        self.running = contextlib.AsyncExitStack()

    async def for_requests(self, peers: Peers, runtime: Runtime) -> PrefillQueue:
        if self._config.role is Role.PREFILL:
            there = await runtime.stage(self._config.worker_endpoint_id)
            peers = Peers(Selection(there, RoundRobin(), "prefill"), peers.breaker, peers.timeouts)
        return PrefillQueue(self.asking, peers)

    async def start(self, engine: Engine, instance_id: int, endpoint: Any) -> None:
        from trtllm_disagg.prefill_queue.taking import Room, Taking

        metrics = QueueMetrics(self.asking.depth, self.asking.age)
        expose(registry_of(metrics), endpoint, self._config)
        if self._config.role is Role.PREFILL and not self._has_left:
            room = Room(self._config.max_batch_size, self._config.max_num_tokens)
            engine.prefilling = room.prefilling
            self._taking = Taking(self._broker, instance_id, room)
            self._taking.start()

    async def leave(self) -> None:
        self._has_left = True
        if self._taking is not None:
            await self._taking.leave()

    async def aclose(self) -> None:
        if self._taking is not None:
            await self._taking.close()
        await self.running.aclose()
        await self._broker.close()


async def open_prefill_queue(
    config: WorkerConfig, group: str, limits: QueueLimits | None = None
) -> WorkerQueue:
    """Open the queue of this worker's group (`pairing.group_of`). Raises ConfigError without NATS, QueueUnusableError
    if the connection breaks at once.
    """
    # A second-stage decode worker opens the queue too: after a switch it is a first stage.
    if config.prefill_dispatch == "direct" or not config.may_switch:
        return WorkerQueue()
    from trtllm_disagg.prefill_queue.broker import Broker
    from trtllm_disagg.prefill_queue.tickets import Names

    queue = NatsQueue(config, await Broker.connect(config.nats_server, Names.of(config, group), limits))
    try:
        await queue.running.enter_async_context(queue.asking.running())
    except BaseException:
        await queue.aclose()
        raise
    return queue
