"""How long a call of another worker may be silent: before its first answer, and before each further one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from trtllm_disagg.config import WorkerConfig
from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.handlers.wait import Wait


class Patience(NamedTuple):
    """Seconds."""

    first: float
    #: A worker that is frozen keeps its connections: nothing else tells that it will never answer.
    next: float


def patience_of(config: WorkerConfig) -> Mapping[str, Patience]:
    """By the errand's stage. Whoever answers a whole request may have to try several others, and then itself."""
    prefill = Patience(config.prefill_timeout, config.prefill_timeout)
    decode = Patience(config.first_decode_token_timeout, config.next_decode_token_timeout)
    tries = config.max_tries + 1
    whole = Patience(tries * prefill.first, tries * max(decode))
    return {"prefill": prefill, "decode": decode, "whole": whole}


class Alarm:
    """Ends a wait that takes too long. One timer for all waits of a call: one for each would cost 5 us a token."""

    def __init__(self, peer: int) -> None:
        """`peer`: the instance that is waited for."""
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._missing, self._seconds = "", 0.0
        self._wait = Wait()
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, what: str, seconds: float) -> None:
        """From now on the current task waits, until `rest`."""
        self._wait.begin()
        self._missing, self._seconds = what, seconds
        self._due = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._due:
            self._set(self._due)

    def rest(self) -> None:
        self._wait.rest()

    def __enter__(self) -> Alarm:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises StageTimeoutError when it was the alarm that ended the wait."""
        if self._timer is not None:
            self._timer.cancel()
        if self._wait.was_ended(error):
            late = StageTimeoutError(f"no {self._missing} within {self._seconds:g} s")
            late.peer = self._peer
            raise late from None

    def _set(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._wait.is_on:
            return  # the next wait sets it again
        if self._loop.time() < self._due:
            self._set(self._due)
            return
        self._wait.end()
