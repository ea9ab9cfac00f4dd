"""A worker's share in the prefill queue, from connecting to leaving it; or none."""

from __future__ import annotations

from typing import Any, Protocol

from trtllm_disagg.config import Role, WorkerConfig
from trtllm_disagg.handlers.remote import StageClient
from trtllm_disagg.prefill_queue.broker import Broker
from trtllm_disagg.prefill_queue.depth import DepthWatch
from trtllm_disagg.prefill_queue.names import Names
from trtllm_disagg.prefill_queue.pulling import Puller
from trtllm_disagg.prefill_queue.pushing import QueueClient
from trtllm_disagg.prefill_queue.room import Room
from trtllm_disagg.publisher.metrics import expose
from trtllm_disagg.publisher.queue_metrics import QueueMetrics
from trtllm_disagg.types import Generate


class PrefillQueue(Protocol):
    @property
    def client(self) -> StageClient | None:
        """The way to the prefill workers; None where there is no queue."""
        ...

    def depth(self) -> int:
        """Prefills that no worker has begun; never waits."""
        ...

    async def start(self, generate: Generate, instance_id: int, endpoint: Any) -> None:
        """A prefill worker begins to pull, for `generate` to answer. The gauges are on /metrics of `endpoint`."""
        ...

    async def leave(self) -> None:
        """No further item is begun here."""
        ...

    async def drained(self) -> None:
        """After `leave`: until all that was begun here has ended."""
        ...

    async def aclose(self) -> None: ...


class NoPrefillQueue:
    """Prefills are sent to one worker each."""

    client = None

    def depth(self) -> int:
        return 0

    async def start(self, generate: Generate, instance_id: int, endpoint: Any) -> None:
        """Nothing to pull."""

    async def leave(self) -> None:
        """Nothing to leave."""

    async def drained(self) -> None:
        """Nothing was begun."""

    async def aclose(self) -> None:
        """Nothing is open."""


class NatsPrefillQueue:
    def __init__(self, config: WorkerConfig, broker: Broker) -> None:
        self._config = config
        self._broker = broker
        self.client = QueueClient(broker, config.queue_timeout)
        self._watch = DepthWatch(broker, self.client.waits)
        self._puller: Puller | None = None

    async def open(self) -> None:
        await self.client.start()
        await self._watch.start()

    def depth(self) -> int:
        return self._watch.depth()

    async def start(self, generate: Generate, instance_id: int, endpoint: Any) -> None:
        expose(QueueMetrics(self._watch), endpoint, self._config)
        if self._config.role is Role.PREFILL:
            room = Room(self._config.max_batch_size, self._config.max_num_tokens)
            self._puller = Puller(self._broker, instance_id, room, generate)
            await self._puller.start()

    async def leave(self) -> None:
        if self._puller is not None:
            self._puller.stop()

    async def drained(self) -> None:
        if self._puller is not None:
            await self._puller.drained()

    async def aclose(self) -> None:
        await self._watch.stop()
        if self._puller is not None:
            await self._puller.close()
        await self._broker.close()


async def open_prefill_queue(config: WorkerConfig, kind: str) -> PrefillQueue:
    """That of all workers of this kind (`pairing.kind_of`). Raises ConfigError when NATS is not there."""
    # A decode worker that is a second stage pushes after a switch.
    if config.prefill_dispatch == "direct" or not config.may_switch:
        return NoPrefillQueue()
    broker = await Broker.connect(config.nats_server, Names.of(config, kind))
    queue = NatsPrefillQueue(config, broker)
    await queue.open()
    return queue
