"""Requests that end before their answer does: their client has left, or this worker leaves.

A request of a client that has left is aborted on the engine, once and not too early. A leaving worker waits for its
requests, then hands the unfinished ones back to the frontend. Only `WorkerDrain` decides which of the two it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import RequestOutput
from trtllm_disagg.errors import WorkerLeavingError
from trtllm_disagg.types import RequestContext

log = logging.getLogger(__name__)

_running: set[asyncio.Task[object]] = set()


def num_in_background() -> int:
    """The number of tasks of `in_background` that have not ended."""
    return len(_running)


def in_background(work: Coroutine[Any, Any, object], what: str) -> None:
    """Run `work`, which may outlive the answer that it is for. If it fails, the log names it as `what`."""
    task = asyncio.create_task(work, name=what)
    # The event loop has only weak references: without this one a task could be collected while it waits.
    _running.add(task)
    task.add_done_callback(_ended)


def _ended(task: asyncio.Task[object]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background work %r failed", task.get_name(), exc_info=error)


class AbortGuard:
    """A context manager that aborts a RequestOutput, once: when `context` is stopped, or when the block is left before
    the result has finished.

    A generation_only request must not be aborted while its KV is on the way: TensorRT-LLM has leaked blocks
    and crashed on that (Dynamo #7489). With `deferred` the abort waits for `may_abort`, at the first output.
    """

    def __init__(
        self, engine: Engine, result: RequestOutput, context: RequestContext, *, deferred: bool = False
    ) -> None:
        self._engine = engine
        self._result = result
        self._context = context
        self._allowed = not deferred
        self._wanted = False
        self._done = False
        self._has_failed = False
        self._contexts = _contexts()

    def __enter__(self) -> AbortGuard:
        self._contexts.add(self.abort, self._context)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._contexts.discard(self.abort)
        if self._has_failed or self._result.finished:
            return
        self.abort()
        if not self._allowed:
            in_background(_read_on(self._result, self), "deferred abort of a decode")

    def abort(self) -> None:
        self._wanted = True
        self._abort_if_due()

    def may_abort(self) -> None:
        """Call this at each output."""
        if not self._allowed:
            self._allowed = True
            self._abort_if_due()

    def failed(self) -> None:
        """The engine has raised for this request, or has died: from now on nothing is aborted or read on."""
        self._has_failed = True

    def _abort_if_due(self) -> None:
        if self._wanted and self._allowed and not self._done and not self._has_failed:
            self._done = True
            self._engine.abort(self._result)


class _Contexts:
    """Polls the contexts of all requests on one event loop. Dynamo can report a stopped context by a future, but sets
    that from a thread of its own: 40 us of CPU a request, stopped or not.
    """

    def __init__(self) -> None:
        self._watched: dict[Callable[[], None], RequestContext] = {}
        self._is_polling = False

    def add(self, act: Callable[[], None], context: RequestContext) -> None:
        if context.is_stopped():
            act()
            return
        self._watched[act] = context
        if not self._is_polling:
            self._poll_later()

    def discard(self, act: Callable[[], None]) -> None:
        self._watched.pop(act, None)

    def _poll_later(self) -> None:
        self._is_polling = bool(self._watched)
        if self._is_polling:
            asyncio.get_running_loop().call_later(POLL_SECONDS, self._poll)

    def _poll(self) -> None:
        try:
            stopped = [act for act, context in self._watched.items() if context.is_stopped()]
            for act in stopped:
                self.discard(act)
                act()
        finally:
            self._poll_later()


#: About the duration of a step of most engines.
POLL_SECONDS = 0.02
_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Contexts] = WeakKeyDictionary()


def _contexts() -> _Contexts:
    loop = asyncio.get_running_loop()
    if (known := _by_loop.get(loop)) is None:
        known = _by_loop[loop] = _Contexts()
    return known


@contextmanager
def when_stopped(context: RequestContext, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` once when `context` is stopped before the block is left."""
    contexts = _contexts()
    contexts.add(act, context)
    try:
        yield
    finally:
        contexts.discard(act)


async def _read_on(result: RequestOutput, guard: AbortGuard) -> None:
    """No client waits for this result any more, but its KV is still on the way."""
    try:
        async for _ in result:
            guard.may_abort()
    except Exception as error:
        log.info("a cancelled request has failed: %s: %s", type(error).__name__, error)


class Wait:
    """A wait of one task that other code can `end`.

    It is armed and disarmed for each token, without a task or a timer of its own, which would cost 5 us a token.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        #: The task that waits; None while no task does: set so to disarm.
        self.waiting: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._was_ended = False

    def arm(self) -> None:
        """From now on the current task waits."""
        task = self.waiting = asyncio.current_task(self._loop)
        assert task is not None
        self._cancelling = task.cancelling()

    def end(self) -> None:
        if self.waiting is not None and not self._was_ended:
            self._was_ended = True
            self.waiting.cancel()

    def was_ended(self, error: BaseException | None) -> bool:
        """Whether `error`, which has ended the wait, was caused by `end` alone. If the task was cancelled at the same
        time, that takes precedence.
        """
        task = self.waiting
        if not self._was_ended or task is None or not isinstance(error, asyncio.CancelledError):
            return False
        return task.uncancel() <= self._cancelling


#: How long `cut` waits. A cancelled request ends at once, unless it waits for something that cannot be cancelled.
_END_SECONDS = 5.0


class WorkerDrain:
    """Counts the requests of a worker that may leave, and ends them when it does."""

    def __init__(self) -> None:
        self._reason: str | None = None
        #: New requests get WorkerLeavingError. `is_over`: and running ones end.
        self.refuses = self.is_over = False
        #: Requests counted so far.
        self.num_entered = 0
        self._running: set[Wait] = set()
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    @property
    def has_begun(self) -> bool:
        return self._reason is not None

    @property
    def num_running(self) -> int:
        """The number of requests that this worker answers or relays, with its engine or without."""
        return len(self._running)

    def begin(self, reason: str) -> None:
        """From now on this worker is leaving, for `reason`, as its errors name it. The first reason stays."""
        self._reason = self._reason or reason

    async def none_runs(self) -> None:
        await self._none_runs.wait()

    async def cut(self) -> None:
        """End all running and all new requests with WorkerLeavingError."""
        self.is_over = True
        for wait in self._running:
            wait.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self.none_runs()

    def enter(self) -> Wait:
        """Count a request, until `leave`; the result is what `cut` ends. Raises WorkerLeavingError once refused."""
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
