"""A queue of prefills on NATS JetStream: a worker that needs a prefill pushes it, prefill workers pull (decision 12).
This module has what a worker uses of the queue, or of none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.handlers.select import QueueStageClient
from trtllm_disagg.types import Generate

if TYPE_CHECKING:
    from trtllm_disagg.prefill_queue.broker import QueueLimits
    from trtllm_disagg.prefill_queue.nats_queue import NatsPrefillQueue


class NoPrefillQueue:
    """The queue of a worker that sends each prefill straight to a prefill worker."""

    #: The client that reaches prefill workers through the queue; None where there is no queue.
    client: QueueStageClient | None = None

    def depth(self) -> int:
        """The number of prefills that no worker has begun; never waits."""
        return 0

    async def start(self, generate: Generate, instance_id: int, endpoint: Any) -> None:
        """Publish the gauges on /metrics of `endpoint`; on a prefill worker, begin to pull prefills for `generate`."""

    async def leave(self) -> None:
        """Begin no further item on this worker, also if it has begun none yet."""

    async def drained(self) -> None:
        """After `leave`: wait until every item that this worker has begun has ended."""

    async def aclose(self) -> None: ...


PrefillQueue: TypeAlias = "NoPrefillQueue | NatsPrefillQueue"


async def open_prefill_queue(
    config: WorkerConfig, kind: str, limits: QueueLimits | None = None
) -> PrefillQueue:
    """That of all workers of a kind (`pairing.kind_of`). Raises ConfigError without NATS, QueueUnusableError when the
    connection breaks at once.
    """
    # A decode worker that is a second stage now pushes after a switch, so it opens the queue too.
    if config.prefill_dispatch == "direct" or not config.may_switch:
        return NoPrefillQueue()
    # Imported only here: NATS' client and its aiohttp are a third of all imports of a worker.
    from trtllm_disagg.prefill_queue.nats_queue import NatsPrefillQueue

    return await NatsPrefillQueue.open(config, kind, limits)
