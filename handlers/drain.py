"""The end of a worker, as its requests see it: they are waited for, then handed back to their frontend.

Whether a request ends because its client left or because this worker does is decided here, and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress

from trtllm_disagg.errors import WorkerLeavingError
from trtllm_disagg.handlers.cancellation import Wait
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

#: A request that is told to end does so at once, unless it waits for something that cannot be cancelled.
_END_SECONDS = 5.0

#: Sees every chunk on its way, and may put another one in its place.
See = Callable[[TokenChunk], TokenChunk]
#: Begins with a request and ends with it.
Recording = Callable[[GenerateRequest, RequestContext], AbstractContextManager[See]]


def no_record(request: GenerateRequest, context: RequestContext) -> AbstractContextManager[See]:
    return nullcontext(lambda chunk: chunk)


class WorkerDrain:
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
        """Requests that this worker answers or relays, however idle its engine is."""
        return len(self._running)

    def begin(self, reason: str) -> None:
        """From now on the worker is leaving; `reason` completes "this worker ends: ...". The first one counts."""
        self._reason = self._reason or reason

    async def none_runs(self) -> None:
        await self._none_runs.wait()

    async def cut(self) -> None:
        """End what still runs, and whatever comes, with WorkerLeavingError."""
        self._is_over = True
        for wait in self._running:
            wait.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self.none_runs()

    def tracking(self, generate: Generate, record: Recording = no_record) -> Generate:
        """`generate`, counted, ended when the worker is, and recorded: in one, since each is work for every chunk."""

        async def tracked(
            request: GenerateRequest, context: RequestContext
        ) -> AsyncGenerator[TokenChunk, None]:
            self._raise_if_over()
            has_ended, choices_left = False, request.num_choices
            with self._counted() as wait, record(request, context) as see:
                async with aclosing(generate(request, context)) as chunks:
                    wait.arm()
                    async for chunk in chunks:
                        wait.disarm()
                        if chunk.finish_reason is not None:
                            choices_left -= 1
                            has_ended = choices_left <= 0
                        yield see(chunk)
                        if not has_ended:
                            self._raise_if_over()
                        wait.arm()
            if self.has_begun and not has_ended:
                # A runtime that is shut down stops all contexts: to a handler that looks as if the client had left.
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
        return WorkerLeavingError(f"this worker ends: {self._reason}")
