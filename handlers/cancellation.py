"""The client left -> the engine's abort, once and at the right moment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from trtllm_disagg.engine.llm_api import RequestOutput
from trtllm_disagg.types import RequestContext

_running: set[asyncio.Task[None]] = set()


def num_in_background() -> int:
    """Work of `in_background` that has not ended."""
    return len(_running)


def in_background(work: Coroutine[Any, Any, None]) -> None:
    """Work for a request that goes on after its answer has ended."""
    task = asyncio.create_task(work)
    # The event loop alone would let a task be collected while it waits.
    _running.add(task)
    task.add_done_callback(_running.discard)


log = logging.getLogger(__name__)


class AbortGuard:
    """Aborts a RequestOutput, once.

    A generation_only request must not be aborted while its KV is on the way: TensorRT-LLM has leaked blocks
    and crashed on that (Dynamo #7489). Such an abort waits for `may_abort`, which is at the first output.
    """

    def __init__(self, result: RequestOutput, *, deferred: bool) -> None:
        self._result = result
        self._allowed = not deferred
        self._wanted = False
        self._done = False
        self._has_failed = False

    def abort(self) -> None:
        self._wanted = True
        self._abort_if_due()

    def may_abort(self) -> None:
        self._allowed = True
        self._abort_if_due()

    def failed(self) -> None:
        """The engine has raised: TensorRT-LLM's result does not say `finished` then, and to read on waits for ever."""
        self._has_failed = True

    @property
    def is_over(self) -> bool:
        """There is nothing to abort."""
        return self._has_failed or self._result.finished

    @property
    def is_waiting(self) -> bool:
        return self._wanted and not self._allowed

    def _abort_if_due(self) -> None:
        if self._wanted and self._allowed and not self._done:
            self._done = True
            self._result.abort()


@contextlib.asynccontextmanager
async def abort_when_stopped(
    result: RequestOutput, context: RequestContext, *, deferred: bool = False
) -> AsyncIterator[AbortGuard]:
    """A context that is stopped aborts the result; so does leaving the body before the result is done."""
    guard = AbortGuard(result, deferred=deferred)
    async with guarded(guard, result, context):
        yield guard


@contextlib.asynccontextmanager
async def guarded(guard: AbortGuard, result: RequestOutput, context: RequestContext) -> AsyncIterator[None]:
    """The same by a guard that its caller has."""

    async def watch() -> None:
        await context.async_killed_or_stopped()
        guard.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        if not guard.is_over:
            guard.abort()
            if guard.is_waiting:
                in_background(_read_on(result, guard))


async def _read_on(result: RequestOutput, guard: AbortGuard) -> None:
    """No client waits for this result any more, but its KV is still on the way."""
    try:
        async for _ in result:
            guard.may_abort()
    except Exception as error:
        log.info("a cancelled request has failed: %s: %s", type(error).__name__, error)


class Wait:
    """A wait that something else than its own task can end.

    Armed and disarmed as often as one likes: no task and no timer for each, which would cost 5 us a token.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._was_ended = False

    @property
    def is_armed(self) -> bool:
        return self._waiting is not None

    def arm(self) -> None:
        """From now on the current task waits, until `disarm`."""
        task = self._waiting = asyncio.current_task(self._loop)
        assert task is not None
        self._cancelling = task.cancelling()

    def disarm(self) -> None:
        self._waiting = None

    def end(self) -> None:
        if self._waiting is not None and not self._was_ended:
            self._was_ended = True
            self._waiting.cancel()

    def was_ended(self, error: BaseException | None) -> bool:
        """Whether `error`, which ends the wait, comes of `end`, and of nothing else: the task may have been cancelled
        at the same time, and that comes first.
        """
        task = self._waiting
        if not self._was_ended or task is None or not isinstance(error, asyncio.CancelledError):
            return False
        return task.uncancel() <= self._cancelling
