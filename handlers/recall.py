"""Frees prefill KV early when its answer never reached a decode engine, by two notices (`PhaseRequest.is_notice`).

`recall` asks the prefill worker to release the KV: from a decode worker that received no answer, or from a prefill
worker with a queued prefill that no decode worker fetches. `fetched` reports that an engine has begun to fetch. If a
decode worker disappears from discovery, the prefill worker releases the KV that it had not reported as fetched.
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
from trtllm_disagg.handlers.drain import in_background
from trtllm_disagg.handlers.selection import StageInstance
from trtllm_disagg.types import MAX_ATTEMPTS, PhaseRequest
from trtllm_disagg.wire.bodies import encode_notice

log = logging.getLogger(__name__)

#: Seeded once by the system: its own numbers take 1 us each.
_ids = random.Random()
#: Errors after which the prefill worker holds no KV.
_REFUSALS = (InvalidRequestError, OverloadedError, EngineError)
_REFUSES_SECONDS = 60.0
#: The number of early recalls that a prefill worker remembers.
_MAX_EARLY = 16 * MAX_ATTEMPTS


@dataclass(frozen=True, slots=True)
class RecallTimes:
    """In seconds."""

    #: To deliver one notice.
    notice: float = 5.0
    #: To collect `fetched` reports for a notice, unless a prefill carries them first. If a decode worker dies
    #: meanwhile, KV that it had begun to fetch may be drained again.
    collect: float = 1.0
    #: Between two checks of the decode workers.
    check: float = 1.0

    @property
    def reported(self) -> float:
        """By then a live decode worker has reported an answer as fetched, even while it leaves."""
        return 2 * self.collect


TIMES = RecallTimes()


# -- on the decode worker


class Notices:
    """Sends notices to the prefill workers that this worker has called."""

    def __init__(
        self, sender: int | None, times: RecallTimes = TIMES, *, recalls_unused: bool = False
    ) -> None:
        """`sender`: this worker's instance id; None: it sends no `fetched`. `recalls_unused`: recall an answer that no
        decode fetches, since a drain needs a decode worker and there may be none.
        """
        self._sender = sender
        self._times = times
        self._recalls_unused = recalls_unused
        #: By instance: attempts to report as fetched.
        self._fetched: dict[int, tuple[StageInstance, list[str]]] = {}
        self._is_scheduled = False
        #: Instances of older versions, which refuse notices -> when to try again, since a new instance may have the id.
        self._without_notices: dict[int, float] = {}

    def new_attempt(self, instance: StageInstance) -> PhaseRequest:
        """The attempt's phase request, with the collected `fetched` reports."""
        _, fetched = self._fetched.pop(instance.instance_id, (instance, ()))
        attempt = f"{_ids.getrandbits(64):016x}"
        return PhaseRequest("prefill", attempts=(attempt,), sender=self._sender, fetched=tuple(fetched))

    def lost(self, instance: StageInstance, asked: PhaseRequest, error: BaseException) -> None:
        """No answer came: recall it, and report again, since the prefill worker may not have received the request."""
        self._report_later(instance, asked.fetched)
        if not isinstance(error, _REFUSALS):
            in_background(self._send(instance, PhaseRequest("recall", attempts=asked.attempts)), "recall")

    def fetched(self, instance: StageInstance, asked: PhaseRequest) -> None:
        self._report_later(instance, asked.attempts)

    def free(self, instance: StageInstance, asked: PhaseRequest, drain: Callable[[], None]) -> None:
        """Free the KV of an answer that arrived but that no decode fetches."""
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
        _, collected = self._fetched.setdefault(instance.instance_id, (instance, []))
        collected.extend(attempts)
        del collected[:-MAX_ATTEMPTS]
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(self._times.collect, self._report)

    def _report(self) -> None:
        self._is_scheduled = False
        fetched, self._fetched = self._fetched, {}
        for instance, attempts in fetched.values():
            in_background(self._send(instance, PhaseRequest("fetched", attempts=tuple(attempts))), "fetched")

    async def _send(self, instance: StageInstance, notice: PhaseRequest) -> Exception | None:
        """Returns why the notice was not delivered. Best effort: the lease ends anyway."""
        try:
            async with asyncio.timeout(self._times.notice):
                await instance.notify(encode_notice(notice))
        except (DisaggError, TimeoutError) as error:
            log.info(
                "instance %x did not accept the notice %r: %s", instance.instance_id, notice.phase, error
            )
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
    """A prefill worker's record of unfetched answers and recalled attempts, by attempt."""

    def __init__(
        self,
        senders: Callable[[], Collection[int]],
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        times: RecallTimes = TIMES,
    ) -> None:
        """`senders`: the decode workers in discovery. An answer is forgotten after `lease_seconds`."""
        self._senders = senders
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._times = times
        #: Running attempt -> whether it was recalled.
        self._running: dict[str, bool] = {}
        #: Recalled attempt without an answer so far, oldest first -> when it is forgotten.
        self._recalled: dict[str, float] = {}
        self._answered: dict[str, _Answered] = {}
        #: Senders that discovery has listed: a new worker may send before that, and is not gone.
        self._seen: set[int] = set()
        self._missing: set[int] = set()
        self._is_scheduled = False

    @property
    def num_untaken(self) -> int:
        """The number of attempts that run, or have KV that no decode is known to have fetched."""
        return len(self._running) + len(self._answered)

    def begin(self, attempts: Collection[str]) -> None:
        """Remember recalls of these running prefills until `end`."""
        self._running.update(dict.fromkeys(attempts, False))

    def end(self, attempts: Collection[str]) -> None:
        for attempt in attempts:
            if self._running.pop(attempt, False):
                self._remember(attempt)

    def receive(self, notice: PhaseRequest) -> None:
        self.fetched(notice.fetched)
        (self.recall if notice.phase == "recall" else self.fetched)(notice.attempts)

    def answered(self, asked: PhaseRequest, take_back: Callable[[], None]) -> None:
        for attempt in asked.attempts:
            if self._recalled.get(attempt, -math.inf) > self._clock():
                take_back()
                continue
            seconds = self._times.notice if asked.sender is None else self._lease_seconds
            now = self._clock()
            self._answered[attempt] = _Answered(asked.sender, now, now + seconds, take_back)
            sender = asked.sender
            if sender is not None and sender not in self._seen and sender in self._senders():
                self._seen.add(sender)
            self._check_later()

    def fetched(self, attempts: Collection[str]) -> None:
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
        """A recall may precede its answer. Since any worker may name any attempt, the oldest of too many are forgotten;
        their leases end anyway.
        """
        now, recalled = self._clock(), self._recalled
        recalled.pop(attempt, None)
        recalled[attempt] = now + self._times.notice
        while recalled and (len(recalled) > _MAX_EARLY or next(iter(recalled.values())) <= now):
            del recalled[next(iter(recalled))]

    def check_senders(self) -> None:
        """Recall the attempts of decode workers that two checks in a row found missing. A draining worker is missing
        too but still reports what it fetches, so young attempts wait for a later check.
        """
        now, there = self._clock(), set(self._senders())
        for attempt, answered in list(self._answered.items()):
            if answered.forgotten_at <= now:
                del self._answered[attempt]
        waiting = {each.sender for each in self._answered.values() if each.sender is not None}
        self._seen = (self._seen | there) & (waiting | there)
        missing = (waiting & self._seen) - there
        # A drain needs a decode worker; without any, the leases end anyway.
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
