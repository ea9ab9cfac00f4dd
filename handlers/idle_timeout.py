"""Idle timeouts: how long a called worker may be silent, and the timer that ends a longer wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import NamedTuple

from trtllm_disagg.config.worker_config import ScheduleStyle, WorkerConfig
from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.handlers.drain import Wait


class StreamTimeouts(NamedTuple):
    """The seconds that a called worker may be silent, before its first chunk and between chunks."""

    first: float
    #: A hung worker keeps its connections: only this timeout detects it.
    next: float


def stream_timeouts_of(config: WorkerConfig) -> Mapping[str, StreamTimeouts]:
    """By `PhaseRequest.phase`. A worker asked for a whole answer may try several peers, then itself."""
    prefill = StreamTimeouts(config.prefill_timeout, config.prefill_timeout)
    decode = StreamTimeouts(first_decode_token_seconds(config), config.next_decode_token_timeout)
    tries = config.max_tries + 1
    answer = StreamTimeouts(tries * prefill.first, tries * max(decode))
    return {"prefill": prefill, "decode": decode, "whole": answer}


def first_decode_token_seconds(config: WorkerConfig) -> float:
    """From decode's dispatch to its first token; under generation_first this includes the prefill."""
    with_prefill = config.schedule_style is ScheduleStyle.GENERATION_FIRST
    return config.first_decode_token_timeout + (config.prefill_timeout if with_prefill else 0.0)


class IdleTimer:
    """Ends a wait that takes too long. All waits of a call share one timer: one per wait would cost 5 us a token."""

    def __init__(self, peer: int) -> None:
        """`peer`: the instance that the call waits for."""
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._missing, self._seconds = "", 0.0
        self._wait = Wait()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def start(self, what: str, seconds: float) -> None:
        """The current task waits from now until `disarm`."""
        self._wait.start()
        self._missing, self._seconds = what, seconds
        self._due = due = self._loop.time() + seconds
        if due < self._timer_at:
            self._set_timer(due)

    def disarm(self) -> None:
        self._wait.waiting = None

    def __enter__(self) -> IdleTimer:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        """Raises StageTimeoutError when this timer has ended the wait."""
        if self._timer is not None:
            self._timer.cancel()
        if self._wait.was_ended(error):
            late = StageTimeoutError(
                f"instance {self._peer:x} sent no {self._missing} within {self._seconds:g} s"
            )
            late.blame(self._peer)
            raise late from None

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(when, self._on_timer), when

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        if self._wait.waiting is None:
            return  # the next `start` sets the timer
        if self._loop.time() < self._due:
            self._set_timer(self._due)
            return
        self._wait.end()
