"""Admission control: refuses a request, before any engine works on it, when too many requests wait on this worker.

A request waits from its arrival to its first chunk: requests in prefill count, requests in decode do not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.errors import OverloadedError
from trtllm_disagg.handlers.streams import PerRequestStream
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0


@dataclass(slots=True)
class Queued:
    """The requests that wait now, and the number of refused ones since the start."""

    requests: int = 0
    #: Prompt tokens of the waiting requests.
    tokens: int = 0
    num_refused: int = 0


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
        """`generate`, which raises OverloadedError for a request that finds no room."""

        def admitted(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
            return _Admitted(self, generate, request, context)

        return admitted

    def enter(self, request: GenerateRequest) -> _WaitingRequest:
        """From now on the request waits. Raises OverloadedError."""
        self._require_room(len(request.token_ids))
        return _WaitingRequest(self._queued, len(request.token_ids))

    def _require_room(self, tokens: int) -> None:
        """Raises OverloadedError. When no other request waits, the prompt may be of any length."""
        limits, queued = self._thresholds.value, self._queued
        if 0 < limits["max_queued_requests"] <= queued.requests:
            self._refuse(f"--max-queued-requests {limits['max_queued_requests']}")
        if queued.requests and 0 < limits["max_queued_tokens"] < queued.tokens + tokens:
            self._refuse(f"--max-queued-tokens {limits['max_queued_tokens']}")

    def _refuse(self, bound: str) -> None:
        self._queued.num_refused += 1
        waiting = f"{self._queued.requests} requests with {self._queued.tokens} prompt tokens"
        if self._clock() >= self._quiet_until:
            self._quiet_until = self._clock() + _LOG_SECONDS
            log.warning(
                "overloaded: %s wait, %s; %d refused so far", waiting, bound, self._queued.num_refused
            )
        raise OverloadedError(
            f"overloaded: {waiting} wait for their first token here ({bound}); try again later"
        )


class _WaitingRequest:
    """The wait of one request. `end` is idempotent."""

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


class _Admitted(PerRequestStream[TokenChunk]):
    def __init__(
        self, admission: Admission, generate: Generate, request: GenerateRequest, context: RequestContext
    ) -> None:
        self._admission = admission
        self._generate = generate
        self._request = request
        self._context = context
        self._wait: _WaitingRequest | None = None

    async def _first(self) -> TokenChunk:
        self._wait = self._admission.enter(self._request)
        self._rest = self._generate(self._request, self._context)
        chunk = await anext(self._rest)
        self._wait.end()
        return chunk

    async def _finish(self) -> None:
        if self._wait is not None:
            self._wait.end()
