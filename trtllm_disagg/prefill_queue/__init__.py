"""Prefills in a global queue on NATS JetStream: a worker that needs one pushes, prefill workers pull (decision 12).
Here as a worker sees the queue, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.handlers.remote import StageClient
from trtllm_disagg.types import Generate

if TYPE_CHECKING:
    from trtllm_disagg.prefill_queue.broker import QueueLimits


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


async def open_prefill_queue(
    config: WorkerConfig, kind: str, limits: QueueLimits | None = None
) -> PrefillQueue:
    """That of all workers of this kind (`pairing.kind_of`). Raises ConfigError when NATS is not there."""
    # A decode worker that is a second stage pushes after a switch.
    if config.prefill_dispatch == "direct" or not config.may_switch:
        return NoPrefillQueue()
    # NATS' client and aiohttp, which it imports, are a third of the imports of a worker.
    from trtllm_disagg.prefill_queue.nats_queue import NatsPrefillQueue

    return await NatsPrefillQueue.open(config, kind, limits)
