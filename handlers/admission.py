"""Refuses a request at the door, before any engine works on it, when too many wait here already.

A request waits from its arrival to its first chunk. So those that are being prefilled count, and those that already
decode do not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.errors import OverloadedError
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0


@dataclass(slots=True)
class Queued:
    """What waits now, and how many requests were refused since the start."""

    requests: int = 0
    #: Of their prompts.
    tokens: int = 0
    shed: int = 0


class Admission:
    def __init__(
        self,
        thresholds: Live[Thresholds],
        queued: Queued,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thresholds = thresholds
        self._queued = queued
        self._clock = clock
        self._quiet_until = clock()

    def admitting(self, generate: Generate) -> Generate:
        """Raises OverloadedError for what finds no room."""

        async def admitted(
            request: GenerateRequest, context: RequestContext
        ) -> AsyncGenerator[TokenChunk, None]:
            self._require_room(len(request.token_ids))
            wait = _Wait(self._queued, len(request.token_ids))
            try:
                async with aclosing(generate(request, context)) as chunks:
                    async for chunk in chunks:
                        wait.end()
                        yield chunk
            finally:
                wait.end()

        return admitted

    def _require_room(self, tokens: int) -> None:
        """One prompt alone may be as long as the engine takes."""
        limits, queued = self._thresholds.value, self._queued
        if 0 < limits.max_queued_requests <= queued.requests:
            self._refuse(f"--max-queued-requests {limits.max_queued_requests}")
        if queued.requests and 0 < limits.max_queued_tokens < queued.tokens + tokens:
            self._refuse(f"--max-queued-tokens {limits.max_queued_tokens}")

    def _refuse(self, bound: str) -> None:
        self._queued.shed += 1
        waiting = f"{self._queued.requests} requests with {self._queued.tokens} prompt tokens"
        if self._clock() >= self._quiet_until:
            self._quiet_until = self._clock() + _LOG_SECONDS
            log.warning("overloaded: %s wait, %s; %d refused so far", waiting, bound, self._queued.shed)
        raise OverloadedError(
            f"overloaded: {waiting} wait for their first token here ({bound}); try again later"
        )


class _Wait:
    """Of one request; it ends once."""

    __slots__ = ("_queued", "_tokens", "_waits")

    def __init__(self, queued: Queued, tokens: int) -> None:
        self._queued, self._tokens, self._waits = queued, tokens, True
        queued.requests += 1
        queued.tokens += tokens

    def end(self) -> None:
        if self._waits:
            self._waits = False
            self._queued.requests -= 1
            self._queued.tokens -= self._tokens
