"""Drains a worker: waits for its requests and background work, and gives unfinished requests back to the frontend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from trtllm_disagg.errors import WorkerLeavingError

log = logging.getLogger(__name__)

_running: set[asyncio.Task[object]] = set()


def num_in_background() -> int:
    """The number of running `in_background` tasks."""
    return len(_running)


def in_background(work: Coroutine[Any, Any, object], what: str) -> asyncio.Task[object]:
    """Run `work`, which may outlive its answer. If it fails, the log calls it `what`."""
    task = asyncio.create_task(work, name=what)
    # The event loop's references are weak: without this one a waiting task could be collected.
    _running.add(task)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[object]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background work %r failed", task.get_name(), exc_info=error)


class Wait:
    """A wait of one task that other code can `end`.

    It is armed and disarmed per token; a task or timer of its own would cost 5 us a token.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        #: The waiting task; set to None to disarm.
        self.waiting: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._was_ended = False

    def start(self) -> None:
        """The current task waits from now on."""
        task = self.waiting = asyncio.current_task(self._loop)
        assert task is not None
        self._cancelling = task.cancelling()

    def end(self) -> None:
        if self.waiting is not None and not self._was_ended:
            self._was_ended = True
            self.waiting.cancel()

    def was_ended(self, error: BaseException | None) -> bool:
        """Whether `end` alone caused the `error` that ended the wait. A simultaneous cancellation of the task takes
        precedence.
        """
        task = self.waiting
        if not self._was_ended or task is None or not isinstance(error, asyncio.CancelledError):
            return False
        return task.uncancel() <= self._cancelling


#: Seconds that `cut` waits. A cancelled request ends at once, unless it waits for something uncancellable.
_END_SECONDS = 5.0


class WorkerDrain:
    """Counts the requests of a worker that may leave, and ends them when it does."""

    def __init__(self) -> None:
        self._reason: str | None = None
        #: New requests get WorkerLeavingError. `is_over`: running ones end, too.
        self.refuses = self.is_over = False
        #: Requests counted since the start.
        self.num_entered = 0
        self._running: set[Wait] = set()
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    @property
    def has_begun(self) -> bool:
        return self._reason is not None

    @property
    def num_running(self) -> int:
        """The number of requests that this worker answers or relays, also without its engine."""
        return len(self._running)

    def begin(self, reason: str) -> None:
        """Start leaving, for `reason`, which its errors name. The first reason stays."""
        self._reason = self._reason or reason

    async def none_runs(self) -> None:
        await self._none_runs.wait()

    async def cut(self) -> None:
        """End running and new requests with WorkerLeavingError."""
        self.is_over = True
        for wait in self._running:
            wait.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self.none_runs()

    def enter(self) -> Wait:
        """Count a request until `leave`; `cut` ends the result. Raises WorkerLeavingError while leaving."""
        if self.is_over or self.refuses:
            raise self.error()
        wait = Wait()
        self.num_entered += 1
        self._running.add(wait)
        self._none_runs.clear()
        return wait

    def leave(self, wait: Wait) -> None:
        self._running.discard(wait)
        if not self._running:
            self._none_runs.set()

    def error(self) -> WorkerLeavingError:
        return WorkerLeavingError(f"this worker is leaving: {self._reason}")
