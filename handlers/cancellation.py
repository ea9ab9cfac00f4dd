"""The client left -> the engine's abort, at the right moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from trtllm_disagg.types import RequestContext


class AbortGuard:
    """Aborts a RequestOutput when its context is stopped.

    A generation_only request must not be aborted while its KV is on the way: TensorRT-LLM has leaked blocks and
    crashed on that (Dynamo #7489). Such an abort waits until `may_abort` is called, which is at the first output.
    """

    def __init__(self, result: Any, *, deferred: bool) -> None:
        self._result = result
        self._allowed = not deferred
        self._wanted = False

    def abort(self) -> None:
        self._wanted = True
        if self._allowed:
            self._result.abort()

    def may_abort(self) -> None:
        if not self._allowed:
            self._allowed = True
            if self._wanted:
                self._result.abort()


@contextlib.asynccontextmanager
async def abort_when_stopped(
    result: Any, context: RequestContext, *, deferred: bool = False
) -> AsyncIterator[AbortGuard]:
    """While the body runs, a stopped context aborts the result; so does leaving the body before the result is done."""
    guard = AbortGuard(result, deferred=deferred)

    async def watch() -> None:
        await context.async_killed_or_stopped()
        guard.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield guard
    finally:
        watcher.cancel()
        if not result.finished:
            guard.may_abort()
            result.abort()
