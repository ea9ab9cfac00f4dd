"""The drain of a leaving worker: it waits for its requests, then hands the unfinished ones back to the frontend.

Only this module decides whether a request has ended because its client left or because this worker does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress

from trtllm_disagg.errors import WorkerLeavingError
from trtllm_disagg.handlers.cancellation import Wait
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

#: How long `cut` waits. A cancelled request ends at once, unless it waits for something that cannot be cancelled.
_END_SECONDS = 5.0

#: Gets every chunk on its way and returns it, or another one in its place.
OnChunk = Callable[[TokenChunk], TokenChunk]
#: Makes the context manager around one request.
ChunkObserver = Callable[[GenerateRequest, RequestContext], AbstractContextManager[OnChunk]]


class WorkerDrain:
    """Counts the requests of a worker that may leave, and ends them when it does."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._is_over = False
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
        self._is_over = True
        for wait in self._running:
            wait.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self.none_runs()

    def tracking(self, generate: Generate, observer: ChunkObserver) -> Generate:
        """`generate`, counted, ended by `cut` and observed: all in one stream, since each layer costs time a chunk."""

        async def tracked(
            request: GenerateRequest, context: RequestContext
        ) -> AsyncGenerator[TokenChunk, None]:
            self._raise_if_over()
            has_ended, choices_left = False, request.num_choices
            with self._counted() as wait, observer(request, context) as on_chunk:
                async with aclosing(generate(request, context)) as chunks:
                    wait.arm()
                    async for chunk in chunks:
                        wait.disarm()
                        if chunk.finish_reason is not None:
                            choices_left -= 1
                            has_ended = choices_left <= 0
                        yield on_chunk(chunk)
                        if not has_ended:
                            self._raise_if_over()
                        wait.arm()
            if self.has_begun and not has_ended:
                # A runtime that shuts down stops all contexts: the handler ended as if the client had left.
                raise self._error()

        return tracked

    @contextmanager
    def _counted(self) -> Iterator[Wait]:
        wait = Wait()
        self._running.add(wait)
        self._none_runs.clear()
        try:
            yield wait
        except asyncio.CancelledError as error:
            if wait.was_ended(error):
                raise self._error() from None
            raise
        finally:
            self._running.discard(wait)
            if not self._running:
                self._none_runs.set()

    def _raise_if_over(self) -> None:
        if self._is_over:
            raise self._error()

    def _error(self) -> WorkerLeavingError:
        return WorkerLeavingError(f"this worker is leaving: {self._reason}")
