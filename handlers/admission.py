"""Admission control: refuses a request, before any engine works on it, when too many requests wait on this worker, or
when this worker already answers too many alone.

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
    """Counts requests and their tokens."""

    requests: int = 0
    tokens: int = 0

    def enter(self, tokens: int) -> Callable[[], None]:
        """Count a request of `tokens` tokens until the result is called."""
        self._add(1, tokens)
        return partial(self._add, -1, -tokens)

    def _add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens


def max_total_tokens(request: GenerateRequest) -> int:
    """The tokens of the prompt and `max_tokens`, which frontends fill in; without it only the prompt counts."""
    return request.num_prompt + (request.stop.max_tokens or 0)


@dataclass(slots=True)
class Queued(RequestCount):
    """The waiting requests, the tokens of their prompts, and the number of requests refused since the start."""

    num_refused: int = 0


class Admission:
    def __init__(
        self, thresholds: Live[Thresholds], queued: Queued, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._thresholds = thresholds
        self._queued = queued
        self._clock = clock
        self._quiet_until = clock()

    def enter(self, request: GenerateRequest) -> Callable[[], None]:
        """Count a waiting request and its prompt's tokens until the result is called. Raises OverloadedError. A lone
        request may have any length. A further choice was admitted with the first.
        """
        limits, queued, tokens = self._thresholds.value, self._queued, request.num_prompt
        if request.is_further_choice:
            return queued.enter(0)
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
    """Limits the requests that this worker answers alone, so a role that has lost all peers is not overloaded."""

    def __init__(self, thresholds: Live[Thresholds]) -> None:
        self._thresholds = thresholds
        self._running = RequestCount()

    def enter(self, request: GenerateRequest) -> Callable[[], None]:
        """Count a request until the result is called. Raises OverloadedError beyond `--max-local-fallbacks` and
        `--max-local-fallback-tokens`. A lone request may have any length.
        """
        limits, running = self._thresholds.value, self._running
        now = f"{running.requests} requests of up to {running.tokens} tokens"
        if 0 < limits["max_local_fallbacks"] <= running.requests:
            raise _overloaded(f"{now} (--max-local-fallbacks {limits['max_local_fallbacks']})")
        max_tokens, tokens = limits["max_local_fallback_tokens"], max_total_tokens(request)
        if running.requests and 0 < max_tokens < running.tokens + tokens:
            raise _overloaded(f"{now} (--max-local-fallback-tokens {max_tokens})")
        return running.enter(tokens)


def _overloaded(running: str) -> OverloadedError:
    return OverloadedError(
        f"overloaded: the other stage fails, and this worker serves {running} alone already; try again later"
    )
