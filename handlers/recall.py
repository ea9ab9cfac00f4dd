"""A prefill worker has answered, and its answer never reached a decode engine. Two messages keep the KV from waiting
for the end of its lease.

`recall`: a decode worker that received no answer asks the prefill worker to release the KV; a prefill worker whose
queued prefill no decode worker fetches asks that, too. `taken`: the sender reports that an engine has begun to fetch.
If a decode worker disappears from discovery, the prefill worker releases by itself what that one had not reported as
taken. Both messages are notices (`PhaseRequest.is_notice`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trtllm_disagg.errors import DisaggError, EngineError, InvalidRequestError, OverloadedError
from trtllm_disagg.handlers.cancellation import in_background
from trtllm_disagg.handlers.circuit_breaker import QUEUE_ID
from trtllm_disagg.handlers.select import StageInstance
from trtllm_disagg.types import MOST_ATTEMPTS, PhaseRequest
from trtllm_disagg.wire.bodies import encode_notice

log = logging.getLogger(__name__)

#: Seeded by the system once: its own numbers take 1 us each.
_ids = random.Random()
#: Errors after which the prefill worker holds no KV.
_REFUSALS = (InvalidRequestError, OverloadedError, EngineError)
_REFUSES_SECONDS = 60.0
#: Early recalls that a prefill worker remembers.
_MOST_EARLY = 16 * MOST_ATTEMPTS


@dataclass(frozen=True, slots=True)
class RecallTimes:
    """In seconds."""

    #: For one notice to be delivered.
    notice: float = 5.0
    #: How long `taken` reports are collected before a notice carries them, unless a prefill does so first. If a decode
    #: worker dies within that time, KV that it had begun to fetch may be drained a second time.
    collect: float = 1.0
    #: Between two checks of the decode workers.
    check: float = 1.0

    @property
    def reported(self) -> float:
        """A decode worker that lives has reported by then that it has taken an answer, also while it leaves."""
        return 2 * self.collect


TIMES = RecallTimes()


# -- on the decode worker


class Notices:
    """The notices to prefill workers that this worker has called, directly or through the prefill queue."""

    def __init__(
        self, sender: int | None, times: RecallTimes = TIMES, *, recalls_unused: bool = False
    ) -> None:
        """`sender`: this worker's instance id. None: `taken` is not reported. `recalls_unused`: an answer that no
        decode fetches is recalled, not drained: a drain needs a decode worker, and there may be none.
        """
        self._sender = sender
        self._times = times
        self._recalls_unused = recalls_unused
        #: By instance: attempts to be reported as taken.
        self._taken: dict[int, tuple[StageInstance, list[str]]] = {}
        self._is_scheduled = False
        #: Instances of older versions, which refuse notices, and until when they get none: others may have their ids.
        self._without_notices: dict[int, float] = {}

    def new_attempt(self, instance: StageInstance) -> PhaseRequest:
        """Its phase request, which carries the collected `taken` reports."""
        _, taken = self._taken.pop(instance.instance_id, (instance, ()))
        attempt = f"{_ids.getrandbits(64):016x}"
        return PhaseRequest("prefill", attempts=(attempt,), sender=self._sender, taken=tuple(taken))

    def lost(self, instance: StageInstance, asked: PhaseRequest, error: BaseException) -> None:
        """No answer has come. The prefill worker may not have got this request, nor the reports in it."""
        self._report_later(instance, asked.taken)
        if instance.instance_id != QUEUE_ID and not isinstance(error, _REFUSALS):
            in_background(self._send(instance, PhaseRequest("recall", attempts=asked.attempts)), "recall")

    def taken(self, instance: StageInstance, asked: PhaseRequest) -> None:
        self._report_later(instance, asked.attempts)

    def free(self, instance: StageInstance, asked: PhaseRequest, drain: Callable[[], None]) -> None:
        """Free the KV of an answer that has arrived and that no decode fetches."""
        if self._recalls_unused:
            in_background(self._recall_or(drain, instance, asked), "recall of a queued prefill")
        else:
            drain()

    async def _recall_or(
        self, drain: Callable[[], None], instance: StageInstance, asked: PhaseRequest
    ) -> None:
        if await self._send(instance, PhaseRequest("recall", attempts=asked.attempts)) is not None:
            drain()

    def _report_later(self, instance: StageInstance, attempts: Sequence[str]) -> None:
        refuses_until = self._without_notices.get(instance.instance_id, 0.0)
        if not attempts or self._sender is None or time.monotonic() < refuses_until:
            return
        _, collected = self._taken.setdefault(instance.instance_id, (instance, []))
        collected.extend(attempts)
        del collected[:-MOST_ATTEMPTS]
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(self._times.collect, self._report)

    def _report(self) -> None:
        self._is_scheduled = False
        taken, self._taken = self._taken, {}
        for instance, attempts in taken.values():
            in_background(self._send(instance, PhaseRequest("taken", attempts=tuple(attempts))), "taken")

    async def _send(self, instance: StageInstance, notice: PhaseRequest) -> Exception | None:
        """Why the notice was not delivered; best effort: the lease ends by itself."""
        try:
            async with asyncio.timeout(self._times.notice):
                await instance.notify(encode_notice(notice))
        except (DisaggError, TimeoutError) as error:
            log.info("instance %x did not accept the notice %r: %s", instance.instance_id, notice.kind, error)
            if isinstance(error, InvalidRequestError):
                self._without_notices[instance.instance_id] = time.monotonic() + _REFUSES_SECONDS
            return error
        return None


# -- on the prefill worker


class _Answered(NamedTuple):
    sender: int | None
    answered_at: float
    forgotten_at: float
    take_back: Callable[[], None]


class Recalls:
    """A prefill worker's record, by attempt, of answers that are not taken yet and of attempts that were recalled."""

    def __init__(
        self,
        senders: Callable[[], Collection[int]],
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        times: RecallTimes = TIMES,
    ) -> None:
        """`senders`: the decode workers that are in discovery now. An answer is forgotten after `lease_seconds`."""
        self._senders = senders
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._times = times
        #: Of each running attempt: it was recalled.
        self._running: dict[str, bool] = {}
        #: Of recalled attempts that this worker has not answered, oldest first: when it is forgotten.
        self._recalled: dict[str, float] = {}
        self._answered: dict[str, _Answered] = {}
        #: Senders that discovery has listed. A worker that has just started may send before that: it is not gone.
        self._seen: set[int] = set()
        self._missing: set[int] = set()
        self._is_scheduled = False

    def begin(self, attempts: Collection[str]) -> None:
        """A recall of a prefill that runs is remembered until `end`, however late."""
        self._running.update(dict.fromkeys(attempts, False))

    def end(self, attempts: Collection[str]) -> None:
        for attempt in attempts:
            if self._running.pop(attempt, False):
                self._remember(attempt)

    def receive(self, notice: PhaseRequest) -> None:
        self.taken(notice.taken)
        (self.recall if notice.kind == "recall" else self.taken)(notice.attempts)

    def answered(self, asked: PhaseRequest, take_back: Callable[[], None]) -> None:
        for attempt in asked.attempts:
            if self._recalled.get(attempt, -math.inf) > self._clock():
                take_back()
                continue
            seconds = self._times.notice if asked.sender is None else self._lease_seconds
            now = self._clock()
            self._answered[attempt] = _Answered(asked.sender, now, now + seconds, take_back)
            if asked.sender is not None and asked.sender not in self._seen:
                self._seen.update({asked.sender}.intersection(self._senders()))
            self._check_later()

    def taken(self, attempts: Collection[str]) -> None:
        for attempt in attempts:
            self._answered.pop(attempt, None)

    def recall(self, attempts: Collection[str]) -> None:
        for attempt in attempts:
            if (answered := self._answered.pop(attempt, None)) is not None:
                answered.take_back()
            elif attempt in self._running:
                self._running[attempt] = True
            else:
                self._remember(attempt)

    def _remember(self, attempt: str) -> None:
        """A recall may come before the answer that it is about. Any worker may name any attempt: of too many the oldest
        are forgotten, and their leases end by themselves.
        """
        now, recalled = self._clock(), self._recalled
        recalled.pop(attempt, None)
        recalled[attempt] = now + self._times.notice
        while recalled and (len(recalled) > _MOST_EARLY or next(iter(recalled.values())) <= now):
            del recalled[next(iter(recalled))]

    def check_senders(self) -> None:
        """Recall the attempts of decode workers that two checks in a row, not one alone, have found missing. One that
        drains is missing too, and reports what it takes, so a young attempt waits for a later check.
        """
        now, there = self._clock(), set(self._senders())
        for attempt, answered in list(self._answered.items()):
            if answered.forgotten_at <= now:
                del self._answered[attempt]
        waiting = {each.sender for each in self._answered.values() if each.sender is not None}
        self._seen = (self._seen | there) & (waiting | there)
        missing = (waiting & self._seen) - there
        # A drain needs a decode worker: without any, the leases end by themselves.
        for gone in missing & self._missing if there else ():
            abandoned = [
                attempt
                for attempt, each in self._answered.items()
                if each.sender == gone and each.answered_at <= now - self._times.reported
            ]
            if abandoned:
                log.warning(
                    "decode worker %x is gone; it had %d of this worker's handoffs", gone, len(abandoned)
                )
            self.recall(abandoned)
        self._missing = missing

    def _check_later(self) -> None:
        if self._is_scheduled or not self._answered:
            return
        self._is_scheduled = True
        asyncio.get_running_loop().call_later(self._times.check, self._check)

    def _check(self) -> None:
        self._is_scheduled = False
        self.check_senders()
        self._check_later()
