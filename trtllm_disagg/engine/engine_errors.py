"""Turns an engine's errors for a request into DisaggErrors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from trtllm_disagg.errors import DisaggError, RequestCancelledError, WorkerLeavingError


class FailingEngine(Protocol):
    death: str | None

    async def failure(self, error: Exception) -> DisaggError: ...


class EngineErrors:
    """The context manager around each wait for a request; a class, since a generator's takes 3 us.

    Raises a DisaggError for an engine's error, WorkerLeavingError if the engine's death cancelled the wait,
    RequestCancelledError if the engine did not end an aborted request. Calls `on_failure` when the request yields no
    more.
    """

    __slots__ = ("_engine", "_on_failure")

    def __init__(self, engine: FailingEngine, on_failure: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._on_failure = on_failure

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        death = self._engine.death
        if death is not None:
            self._on_failure()
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:  # another task cancelled this one
                return
            if death is not None:
                raise WorkerLeavingError(f"the engine is dead: {death}") from None
            self._on_failure()
            raise RequestCancelledError("the engine did not finish the aborted request") from None
        if isinstance(error, Exception) and not isinstance(error, DisaggError):
            # TensorRT-LLM's result never becomes `finished` then, and reading on would hang.
            self._on_failure()
            raise await self._engine.failure(error) from error
