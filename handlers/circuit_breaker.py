"""Calls of the other stage, with deadlines for their answers, and a breaker that hears how they end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    NoInstanceError,
    PeerUnavailableError,
    QueueUnusableError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.cancellation import Wait
from trtllm_disagg.handlers.remote import StageClient, StageInstance
from trtllm_disagg.types import GenerateRequest, RequestContext

# A circuit breaker for each instance of the other stage.


log = logging.getLogger(__name__)


class Breaker:
    """An instance that failed several times in a row is left alone for a while; then one failure more is enough."""

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._seconds = seconds
        self._clock = clock
        self._failures: dict[int, int] = {}
        self._open_until: dict[int, float] = {}

    def open(self) -> frozenset[int]:
        """Instances that are to be left alone now."""
        now = self._clock()
        return frozenset(i for i, until in self._open_until.items() if now < until)

    def failed(self, instance_id: int) -> None:
        count = self._failures[instance_id] = self._failures.get(instance_id, 0) + 1
        if count >= self._limit:
            log.warning(
                "instance %x failed %d times in a row: left alone for %g s", instance_id, count, self._seconds
            )
            self._open_until[instance_id] = self._clock() + self._seconds

    def succeeded(self, instance_id: int) -> None:
        self._failures.pop(instance_id, None)
        self._open_until.pop(instance_id, None)


# How long a call of another worker may be silent: before its first answer, and before each further one.


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


#: What speaks against an instance. An overloaded one is well, and a bad request is none of its faults.
_FAULTS = (PeerUnavailableError, StageTimeoutError, EngineError)


class WatchedStage:
    def __init__(self, stage: StageClient, breaker: Breaker, patience: Mapping[str, Patience]) -> None:
        """`patience`: by the errand's stage."""
        self._stage = stage
        self._breaker = breaker
        self._patience = patience
        self._unanswered = Unanswered()

    def instance_ids(self) -> Collection[int]:
        return self._stage.instance_ids()

    def check(self, request: GenerateRequest) -> None:
        self._stage.check(request)

    def num_well(self) -> int:
        """Instances whose breaker is closed."""
        return len(set(self.instance_ids()) - self._breaker.open())

    def depth(self) -> int:
        """Calls of this worker without an answer yet, beyond one for each instance: those wait."""
        return max(0, self._unanswered.count - len(self.instance_ids()))

    async def pick(self, request: GenerateRequest) -> WatchedInstance:
        """One whose breaker is closed; if there is none, any: better a doubtful instance than none."""
        cautious = request
        for instance_id in self._breaker.open():
            cautious = cautious.avoiding(instance_id)
        try:
            picked = await self._stage.pick(cautious)
        except NoInstanceError:
            if cautious is request:
                raise
            picked = await self._stage.pick(request)
        return WatchedInstance(picked, self._breaker, self._patience, self._unanswered)


class Unanswered:
    """How many calls wait for their first answer."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


class WatchedInstance:
    def __init__(
        self,
        instance: StageInstance,
        breaker: Breaker,
        patience: Mapping[str, Patience],
        unanswered: Unanswered,
    ) -> None:
        self._instance = instance
        self._breaker = breaker
        self._patience = patience
        self._unanswered = unanswered

    @property
    def instance_id(self) -> int:
        return self._instance.instance_id

    async def describe(self) -> dict[str, Any]:
        return await self._instance.describe()

    async def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        stage = str(request["errand"]["stage"])
        patience = self._patience[stage]
        further = f"further answer to {stage}"
        try:
            with Alarm(self.instance_id) as alarm:
                async with aclosing(self._instance.call(request, context)) as answers:
                    alarm.expect(f"answer to {stage}", patience.first)
                    with self._unanswered:
                        first = await anext(answers, None)
                    if first is not None:
                        alarm.rest()
                        yield first
                        alarm.expect(further, patience.next)
                        async for answer in answers:
                            alarm.rest()
                            yield answer
                            alarm.expect(further, patience.next)
                self._breaker.succeeded(self.instance_id)
        except DisaggError as error:
            if isinstance(error, _FAULTS) and not isinstance(error, QueueUnusableError):
                self._breaker.failed(self.instance_id)
            raise
