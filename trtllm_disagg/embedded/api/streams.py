"""The requests that an LLM waits for, and the streams that their outputs go to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from trtllm_disagg.embedded.api.result import RequestError, RequestOutput, wake
from trtllm_disagg.embedded.ipc.messages import TokenOutput


class RunningRequests:
    """`add` and `fail_all` from any thread, `deliver` from the one thread that has to tell of a request."""

    def __init__(self) -> None:
        self._results: dict[int, RequestOutput] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._results)

    def add(self, result: RequestOutput) -> None:
        with self._lock:
            self._results[result.request_id] = result

    def deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """To those that still run; a stream that has all its outputs is dropped."""
        delivered: list[RequestOutput] = []
        for output in outputs:
            if (result := self._results.get(output.request_id)) is None:
                continue
            if output.finish_reason is not None or output.error is not None:
                self._forget_when_done(result, output)
            result.deliver(output)
            delivered.append(result)
        wake(delivered)

    def fail_all(self, reason: str) -> None:
        """There is no engine any more."""
        with self._lock:
            results, self._results = list(self._results.values()), {}
        for result in results:
            result.deliver(RequestError(reason, "Unavailable"))
        wake(results)

    def _forget_when_done(self, result: RequestOutput, output: TokenOutput) -> None:
        result.choices_left -= 1
        if result.choices_left == 0 or output.error is not None:
            self._results.pop(output.request_id, None)


class Feed:
    """Records from the engine's receiver thread to the caller that polls for them: events, statistics. Bounded; the
    oldest records are dropped. One asyncio reader at a time waits without polling.
    """

    def __init__(self, max_size: int | None) -> None:
        self._records: deque[dict[str, Any]] = deque(maxlen=max_size)
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def extend(self, records: Iterable[dict[str, Any]]) -> None:
        """From any thread."""
        before = len(self._records)
        self._records.extend(records)
        waiter = self._waiter
        if waiter is not None and len(self._records) != before:
            loop, event = waiter
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(event.set)

    def take(self) -> list[dict[str, Any]]:
        return [self._records.popleft() for _ in range(len(self._records))]

    async def wait(self, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """What is there; when nothing is, what comes within `timeout` seconds. What the reader leaves stays."""
        if not self._records and timeout:
            event = asyncio.Event()
            self._waiter = (asyncio.get_running_loop(), event)
            with contextlib.suppress(TimeoutError):
                if not self._records:  # it may have come before the waiter stood
                    await asyncio.wait_for(event.wait(), timeout)
            self._waiter = None
        while self._records:
            yield self._records.popleft()
