"""Admission control: refuses a request, before any engine works on it, when too many requests wait on this worker, or
when it runs too many alone in place of the other stage.

A request waits from its arrival to its first chunk: requests in prefill count, requests in decode do not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.errors import OverloadedError
from trtllm_disagg.types import GenerateRequest

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
        self, thresholds: Live[Thresholds], queued: Queued, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._thresholds = thresholds
        self._queued = queued
        self._clock = clock
        self._quiet_until = clock()

    def enter(self, tokens: int) -> Callable[[], None]:
        """Count a waiting request with so many prompt tokens, until the result is called. Raises OverloadedError. When
        no other request waits, the prompt may be of any length.
        """
        limits, queued = self._thresholds.value, self._queued
        if 0 < limits["max_queued_requests"] <= queued.requests:
            self._refuse(f"--max-queued-requests {limits['max_queued_requests']}")
        if queued.requests and 0 < limits["max_queued_tokens"] < queued.tokens + tokens:
            self._refuse(f"--max-queued-tokens {limits['max_queued_tokens']}")
        return queued.enter(tokens)

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


class FallbackBudget:
    """What this worker can run besides its own work: when all workers of one role are lost, their work must not
    overload those of the other role.
    """

    def __init__(self, thresholds: Live[Thresholds]) -> None:
        self._thresholds = thresholds
        self._running = RequestCount()

    def enter(self, request: GenerateRequest) -> Callable[[], None]:
        """Count a request until the result is called. Raises OverloadedError beyond `--max-local-fallbacks` and
        `--max-local-fallback-tokens`; when no other one runs, a request may be of any length.
        """
        limits, running = self._thresholds.value, self._running
        now = f"{running.requests} requests of up to {running.tokens} tokens"
        if 0 < limits["max_local_fallbacks"] <= running.requests:
            raise _overloaded(f"{now} (--max-local-fallbacks {limits['max_local_fallbacks']})")
        most, tokens = limits["max_local_fallback_tokens"], most_tokens(request)
        if running.requests and 0 < most < running.tokens + tokens:
            raise _overloaded(f"{now} (--max-local-fallback-tokens {most})")
        return running.enter(tokens)


def _overloaded(running: str) -> OverloadedError:
    return OverloadedError(
        f"overloaded: the other stage fails, and this worker serves {running} alone already; try again later"
    )
