"""How much waits in the queue, and for how long: asked for in the background, told without waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from trtllm_disagg.errors import QueueUnusableError
from trtllm_disagg.prefill_queue.broker import Broker

_ASK_SECONDS = 0.25


class DepthWatch:
    """A QueueDepth. Between `start` and `stop` it knows what was so a quarter of a second ago."""

    def __init__(self, broker: Broker, num_own: Callable[[], int]) -> None:
        """`num_own`: waiting items of this worker, which it knows without asking anybody."""
        self._broker = broker
        self._num_own = num_own
        self._num_waiting = 0
        #: (place of the oldest one, when it was pushed)
        self._oldest: tuple[int, float] | None = None
        self._task: asyncio.Task[None] | None = None

    def depth(self) -> int:
        """Prefills that no worker has begun. A queue that cannot be reached holds nothing for anybody."""
        known = self._num_waiting if self._broker.is_usable else 0
        return max(known, self._num_own())

    def age(self) -> float:
        """Seconds for which the oldest of them has waited; 0 when there is none."""
        if self._oldest is None or not self._broker.is_usable:
            return 0.0
        return max(0.0, time.time() - self._oldest[1])

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
