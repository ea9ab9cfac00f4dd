"""When a worker of the other role counts as failing: a circuit breaker for each instance, and idle timeouts."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from trtllm_disagg.config.worker_config import ScheduleStyle, WorkerConfig
from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.handlers.cancellation import Wait

log = logging.getLogger(__name__)


#: The instance id that stands for the prefill queue when a prefill failed before a worker took it.
QUEUE_ID = 0


def name_of(instance_id: int) -> str:
    """For logs and errors."""
    return "the prefill queue" if instance_id == QUEUE_ID else f"instance {instance_id:x}"


class Sign(Enum):
    """What an instance fails or succeeds in. A prefill worker that answers says nothing about the way of its KV."""

    ANSWERS = "answers"
    KV_ARRIVES = "kv_arrives"


class CircuitBreaker:
    """Skips an instance for a while after `failures` failures of one sign in a row, and after each further one."""

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._seconds = seconds
        self._clock = clock
        self._failures: dict[tuple[int, Sign], int] = {}
        self._open_until: dict[int, float] = {}
        self.times_opened = 0

    def open(self) -> frozenset[int]:
        """Instances to skip now. May be called from any thread."""
        now = self._clock()
        return frozenset(i for i, until in list(self._open_until.items()) if now < until)

    def failed(self, instance_id: int, sign: Sign = Sign.ANSWERS) -> None:
        count = self._failures[instance_id, sign] = self._failures.get((instance_id, sign), 0) + 1
        if count >= self._limit:
            log.warning(
                "instance %x failed %d times in a row: skipped for %g s", instance_id, count, self._seconds
            )
            self._open_until[instance_id] = self._clock() + self._seconds
            self.times_opened += 1

    def succeeded(self, instance_id: int, sign: Sign = Sign.ANSWERS) -> None:
        if not self._failures:
            return
        self._failures.pop((instance_id, sign), None)
        if all(self._failures.get((instance_id, each), 0) < self._limit for each in Sign):
            self._open_until.pop(instance_id, None)


class StreamTimeouts(NamedTuple):
    """Seconds that a called worker may be silent, before its first chunk and before each further one."""

    first: float
    #: A worker that hangs keeps its connections: only this timeout detects it.
    next: float


def stream_timeouts_of(config: WorkerConfig) -> Mapping[str, StreamTimeouts]:
    """By `PhaseRequest.kind`. A worker asked for a whole answer may try several others, then itself."""
    prefill = StreamTimeouts(config.prefill_timeout, config.prefill_timeout)
    decode = StreamTimeouts(first_decode_token_seconds(config), config.next_decode_token_timeout)
    tries = config.max_tries + 1
    whole = StreamTimeouts(tries * prefill.first, tries * max(decode))
    return {"prefill": prefill, "decode": decode, "cached": prefill, "whole": whole}


def first_decode_token_seconds(config: WorkerConfig) -> float:
    """From the dispatch of decode to its first token; under generation_first prefill is dispatched then, too."""
    with_prefill = config.schedule_style is ScheduleStyle.GENERATION_FIRST
    return config.first_decode_token_timeout + (config.prefill_timeout if with_prefill else 0.0)


class IdleTimer:
    """Ends a wait that takes too long. One timer for all waits of a call: one for each would cost 5 us a token."""

    def __init__(self, peer: Callable[[], int]) -> None:
        """`peer`: the instance that the call waits for. It may change: the prefill queue hands the request on."""
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._missing, self._seconds = "", 0.0
        self._wait = Wait()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def arm(self, what: str, seconds: float) -> None:
        """From now on the current task waits, until `disarm`."""
        self._wait.arm()
        self._missing, self._seconds = what, seconds
        self._due = due = self._loop.time() + seconds
        if due < self._timer_at:
            self._set_timer(due)

    def disarm(self) -> None:
        self._wait.waiting = None

    def __enter__(self) -> IdleTimer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises StageTimeoutError when this timer has ended the wait."""
        if self._timer is not None:
            self._timer.cancel()
        if self._wait.was_ended(error):
            peer = self._peer()
            late = StageTimeoutError(f"{name_of(peer)} sent no {self._missing} within {self._seconds:g} s")
            late.blame(peer)
            raise late from None

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(when, self._on_timer), when

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        if self._wait.waiting is None:
            return  # the next `arm` sets the timer
        if self._loop.time() < self._due:
            self._set_timer(self._due)
            return
        self._wait.end()
