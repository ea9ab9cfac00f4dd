"""Errors that an engine raises for a request become DisaggErrors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from trtllm_disagg.errors import DisaggError, RequestCancelledError, WorkerLeavingError

if TYPE_CHECKING:
    from trtllm_disagg.engine.engine import Engine


class EngineErrors:
    """The context manager around each wait for a request. It is a class: one made of a generator takes 3 us.

    Raises a DisaggError for an error of the engine, WorkerLeavingError where the engine's death has cancelled the wait,
    and RequestCancelledError where the engine has not ended a request that was aborted. `on_failure` is called when
    nothing more comes of the request.
    """

    __slots__ = ("_engine", "_on_failure")

    def __init__(self, engine: Engine, on_failure: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._on_failure = on_failure

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        death = self._engine.death
        if death is not None:
            self._on_failure()
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:  # another task has cancelled this one
                return
            if death is not None:
                raise WorkerLeavingError(f"the engine is dead: {death}") from None
            self._on_failure()
            raise RequestCancelledError("the engine did not finish the aborted request") from None
        if isinstance(error, Exception) and not isinstance(error, DisaggError):
            # TensorRT-LLM's result never becomes `finished` then, and reading on would hang.
            self._on_failure()
            raise await self._engine.failure(error) from error
