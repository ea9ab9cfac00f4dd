"""How much waits in the queue, and for how long: asked for in the background, told without waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from trtllm_disagg.errors import QueueUnusableError
from trtllm_disagg.prefill_queue.broker import Broker

_ASK_SECONDS = 0.25


class DepthWatch:
    """A QueueDepth. Between `start` and `stop` it knows what was so a quarter of a second ago."""

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
        """Prefills that no worker has begun. A queue that cannot be reached holds nothing for anybody."""
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
