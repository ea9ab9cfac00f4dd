"""Aborts a request on the engine when its client leaves: once, and not too early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import RequestOutput
from trtllm_disagg.handlers.drain import in_background
from trtllm_disagg.types import RequestContext

log = logging.getLogger(__name__)


class AbortGuard:
    """A context manager that aborts a RequestOutput once, when `context` stops or the block exits before the result has
    finished.

    With `deferred` the abort waits for `may_abort`, at the first output: TensorRT-LLM has leaked blocks and crashed
    when a generation_only request was aborted during its KV transfer (Dynamo #7489). `Engine.needs_uncached_prompt` is
    another reason.
    """

    def __init__(
        self, engine: Engine, result: RequestOutput, context: RequestContext, *, deferred: bool = False
    ) -> None:
        self._engine = engine
        self._result = result
        self._context = context
        self._allowed = not deferred
        #: Called when a request ends after its block exited too early for an abort.
        self.then: Callable[[], None] = lambda: None
        self._wanted = False
        self._done = False
        self._has_failed = False
        self._contexts = _contexts()

    def __enter__(self) -> AbortGuard:
        self._contexts.add(self.abort, self._context)
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        self._contexts.discard(self.abort)
        if self._has_failed or self._result.finished:
            return
        self.abort()
        if not self._allowed:
            in_background(self._read_on(), "deferred abort")

    def abort(self) -> None:
        self._wanted = True
        self._abort_if_due()

    async def _read_on(self) -> None:
        """The client has left, but the KV is in transfer, or the prompt must be computed to its end."""
        try:
            async for _ in self._result:
                self.may_abort()
        except Exception as error:
            log.info("a cancelled request has failed: %s: %s", type(error).__name__, error)
        else:
            self.then()

    def may_abort(self) -> None:
        """Call this at the first output."""
        if not self._allowed:
            self._allowed = True
            self._abort_if_due()

    def failed(self) -> None:
        """The engine raised for this request, or died: neither abort nor read on."""
        self._has_failed = True

    def _abort_if_due(self) -> None:
        is_due = self._wanted and (self._allowed or self._result.finished)
        if is_due and not self._done and not self._has_failed:
            self._done = True
            self._engine.abort(self._result)


class _Contexts:
    """Polls the contexts of all requests on one event loop. Dynamo could report a stopped context by a future, but sets
    it from another thread: 40 us of CPU a request, stopped or not.
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


#: About one engine step.
POLL_SECONDS = 0.02
_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Contexts] = WeakKeyDictionary()


def _contexts() -> _Contexts:
    loop = asyncio.get_running_loop()
    if (known := _by_loop.get(loop)) is None:
        known = _by_loop[loop] = _Contexts()
    return known


@contextmanager
def when_stopped(context: RequestContext, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` once if `context` stops before the block exits."""
    contexts = _contexts()
    contexts.add(act, context)
    try:
        yield
    finally:
        contexts.discard(act)
