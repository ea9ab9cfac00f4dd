"""A worker's share in the prefill queue, from connecting to leaving it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import QueueMetrics, expose, registry_of
from trtllm_disagg.errors import QueueUnusableError
from trtllm_disagg.prefill_queue.broker import Broker, QueueLimits
from trtllm_disagg.prefill_queue.messages import Names
from trtllm_disagg.prefill_queue.puller import Puller, Room
from trtllm_disagg.prefill_queue.queue_client import QueueClient
from trtllm_disagg.types import Generate

_ASK_SECONDS = 0.25


class DepthWatch:
    """A QueueDepth: how much waits in the queue, and for how long, asked in the background and told without waiting.

    Between `start` and `stop` it knows what was so a quarter of a second ago.
    """

    def __init__(self, broker: Broker, own: Callable[[], Sequence[float]]) -> None:
        """`own`: for how many seconds each item of this worker has waited. To JetStream an item does not wait any more
        when some worker has been given it, even if that one hangs.
        """
        self._broker = broker
        self._own = own
        self._num_waiting = 0
        #: (place of the oldest one, when it was pushed)
        self._oldest: tuple[int, float] | None = None
        self._task: asyncio.Task[None] | None = None

    def depth(self) -> int:
        """Prefills that no worker has begun. A queue that cannot be reached holds nothing."""
        known = self._num_waiting if self._broker.is_usable else 0
        return max(known, len(self._own()))

    def age(self) -> float:
        """Seconds for which the oldest of them has waited; 0 when there is none."""
        is_known = self._oldest is not None and self._broker.is_usable
        known = time.time() - self._oldest[1] if is_known and self._oldest is not None else 0.0
        return max(0.0, known, *self._own())

    async def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="prefill-queue-depth")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while True:
            await self._broker.wait_until_usable()
            try:
                await self._look()
            except QueueUnusableError:
                self._num_waiting, self._oldest = 0, None
            await asyncio.sleep(_ASK_SECONDS)

    async def _look(self) -> None:
        self._num_waiting, place = await self._broker.waiting()
        if not self._num_waiting:
            self._oldest = None
        elif self._oldest is None or self._oldest[0] != place:
            pushed_at = await self._broker.pushed_at(place)
            self._oldest = (place, pushed_at) if pushed_at is not None else None


class NatsPrefillQueue:
    def __init__(self, config: WorkerConfig, broker: Broker) -> None:
        self._config = config
        self._broker = broker
        self.client = QueueClient(broker, config.queue_timeout)
        self._watch = DepthWatch(broker, self.client.waits)
        self._puller: Puller | None = None
        self._open = contextlib.AsyncExitStack()

    @classmethod
    async def open(cls, config: WorkerConfig, kind: str, limits: QueueLimits | None) -> NatsPrefillQueue:
        """Raises ConfigError when NATS is not there."""
        queue = cls(config, await Broker.connect(config.nats_server, Names.of(config, kind), limits))
        await queue._open.enter_async_context(queue.client.listening())
        await queue._watch.start()
        return queue

    def depth(self) -> int:
        return self._watch.depth()

    async def start(self, generate: Generate, instance_id: int, endpoint: Any) -> None:
        expose(registry_of(QueueMetrics(self._watch)), endpoint, self._config)
        if self._config.role is Role.PREFILL:
            room = Room(self._config.max_batch_size, self._config.max_num_tokens)
            self._puller = Puller(self._broker, instance_id, room, generate)
            self._puller.start()

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
        await self._open.aclose()
        await self._broker.close()
