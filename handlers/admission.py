"""Admission control: refuses a request, before any engine works on it, when too many requests wait on this worker, or
when it runs too many alone in place of the other stage.

A request waits from its arrival to its first chunk: requests in prefill count, requests in decode do not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.errors import OverloadedError
from trtllm_disagg.streams import CountedStream
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0


@dataclass(slots=True)
class RequestCount:
    """The number of requests that are counted now, and of their tokens."""

    requests: int = 0
    tokens: int = 0

    def enter(self, tokens: int) -> Callable[[], None]:
        """Count a request with so many tokens, until the result is called."""
        self._add(1, tokens)
        return partial(self._add, -1, -tokens)

    def counting(self, generate: Generate) -> Generate:
        """`generate`, whose running requests are counted, with their prompts and the most that may be generated."""

        def counted(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
            return CountedStream(
                partial(self.enter, most_tokens(request)), partial(generate, request, context)
            )

        return counted

    def _add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens


def most_tokens(request: GenerateRequest) -> int:
    """The tokens of the prompt and `max_tokens`, which frontends fill in; without it only the prompt counts."""
    return len(request.token_ids) + (request.stop.max_tokens or 0)


@dataclass(slots=True)
class Queued(RequestCount):
    """The requests that wait now, with the tokens of their prompts, and the number of refused ones since the start."""

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
            enter = partial(self._enter, len(request.token_ids))
            return CountedStream(enter, partial(generate, request, context), until_first=True)

        return admitted

    def _enter(self, tokens: int) -> Callable[[], None]:
        """Count a waiting request with so many prompt tokens, until the result is called. Raises OverloadedError."""
        self._require_room(tokens)
        return self._queued.enter(tokens)

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


def within_fallback_budget(local: Generate, thresholds: Live[Thresholds]) -> Generate:
    """`local`, limited to what this worker can run besides its own work: when all workers of one role are lost, their
    work must not overload those of the other role. Raises OverloadedError beyond `--max-local-fallbacks` and
    `--max-local-fallback-tokens`; when no other one runs, a request may be of any length.
    """
    running = RequestCount()
    counted = running.counting(local)

    def bounded(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        limits = thresholds.value
        now = f"{running.requests} requests of up to {running.tokens} tokens"
        if 0 < limits["max_local_fallbacks"] <= running.requests:
            raise _overloaded(f"{now} (--max-local-fallbacks {limits['max_local_fallbacks']})")
        most = limits["max_local_fallback_tokens"]
        if running.requests and 0 < most < running.tokens + most_tokens(request):
            raise _overloaded(f"{now} (--max-local-fallback-tokens {most})")
        return counted(request, context)

    return bounded


def _overloaded(running: str) -> OverloadedError:
    return OverloadedError(
        f"overloaded: the other stage fails, and this worker serves {running} alone already; try again later"
    )
