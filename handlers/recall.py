"""Prefills with an answer that is lost: the decode worker is told to stop waiting just as it comes, or dies with it.

The prefill worker has answered, so it counts the KV as the caller's. A decode worker that has no answer recalls the
attempt; one that has it says "taken" when its engine has been asked to fetch. What a decode worker that is gone has not
taken, the prefill worker takes back by itself. Taken back means: the KV is fetched as if no answer had been given.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec

from trtllm_disagg.errors import DisaggError, EngineError, InvalidRequestError, OverloadedError
from trtllm_disagg.handlers.cancellation import in_background
from trtllm_disagg.handlers.chain import prefill_service
from trtllm_disagg.types import (
    MOST_ATTEMPTS,
    Generate,
    GenerateRequest,
    Handoff,
    PhaseRequest,
    PrefillPhase,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

log = logging.getLogger(__name__)

#: Of one notice, with its way.
NOTICE_SECONDS = 5.0
#: The next prefill says what was taken, or a notice when none follows; so long a decode worker that dies may have begun
#: to fetch what is fetched once more. To Dynamo's counters a notice is a request.
TOGETHER_SECONDS = 1.0
LOOK_SECONDS = 1.0
#: A lease that does not end is remembered no longer.
_LONGEST_SECONDS = 600.0
_NOTHING: tuple[TokenChunk, ...] = ()

#: The prefill worker has said that there is no KV.
_REFUSALS = (InvalidRequestError, OverloadedError, EngineError)


# -- on the worker that asks


class Teller(Protocol):
    """The instance that was asked (`remote.StageInstance`)."""

    @property
    def instance_id(self) -> int: ...

    async def tell(self, notice: dict[str, Any]) -> None: ...


class Notices:
    def __init__(self, sender: int | None) -> None:
        """`sender`: the instance that asks. None: it is not to be missed when it is gone."""
        self._sender = sender
        self._taken: dict[int, tuple[Teller, list[str]]] = {}
        self._will_tell = False
        #: Older workers.
        self._deaf: set[int] = set()

    def prefill(self, instance: Teller) -> PhaseRequest:
        _, taken = self._taken.pop(instance.instance_id, (instance, ()))
        attempt = secrets.token_hex(8)
        return PhaseRequest("prefill", attempts=(attempt,), sender=self._sender, taken=tuple(taken))

    @contextmanager
    def recalled_without(
        self, answers: Collection[Handoff], instance: Teller, asked: PhaseRequest
    ) -> Iterator[None]:
        """Inside, the answer is waited for; outside, one that is not there is lost."""
        is_refused = False
        try:
            yield
        except _REFUSALS:
            is_refused = True
            raise
        finally:
            if not answers:
                # It may not have heard.
                self._tell_later(instance, asked.taken)
            if not answers and not is_refused:
                in_background(self._tell(instance, PhaseRequest("recall", attempts=asked.attempts)))

    def taken(self, instance: Teller, asked: PhaseRequest) -> None:
        self._tell_later(instance, asked.attempts)

    def _tell_later(self, instance: Teller, attempts: Sequence[str]) -> None:
        if not attempts or self._sender is None or instance.instance_id in self._deaf:
            return
        _, untold = self._taken.setdefault(instance.instance_id, (instance, []))
        untold.extend(attempts)
        del untold[:-MOST_ATTEMPTS]
        if not self._will_tell:
            self._will_tell = True
            asyncio.get_running_loop().call_later(TOGETHER_SECONDS, self._tell_taken)

    def _tell_taken(self) -> None:
        self._will_tell = False
        taken, self._taken = self._taken, {}
        for instance, attempts in taken.values():
            in_background(self._tell(instance, PhaseRequest("taken", attempts=tuple(attempts))))

    async def _tell(self, instance: Teller, said: PhaseRequest) -> None:
        try:
            async with asyncio.timeout(NOTICE_SECONDS):
                await instance.tell({"token_ids": [], "errand": msgspec.to_builtins(said)})
        except (DisaggError, TimeoutError) as error:
            if isinstance(error, InvalidRequestError):
                self._deaf.add(instance.instance_id)
            # Best effort: the lease ends by itself.
            log.info("instance %x does not hear %r: %s", instance.instance_id, said.stage, error)


class NoNotices:
    """For a way that knows what became of its answers."""

    def prefill(self, instance: Teller) -> PhaseRequest:
        return PhaseRequest("prefill")

    @contextmanager
    def recalled_without(
        self, answers: Collection[Handoff], instance: Teller, asked: PhaseRequest
    ) -> Iterator[None]:
        yield

    def taken(self, instance: Teller, asked: PhaseRequest) -> None:
        """The queue has heard of it."""


# -- on the prefill worker


class _Answered(NamedTuple):
    sender: int | None
    forgotten_at: float
    take_back: Callable[[], None]


class Recalls:
    """What was answered and not yet taken, and what was recalled, by attempt."""

    def __init__(
        self,
        senders: Callable[[], Collection[int]],
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`senders`: the instances that may ask, as far as they are there."""
        self._senders = senders
        self._lease_seconds = min(lease_seconds, _LONGEST_SECONDS)
        self._clock = clock
        self._running: set[str] = set()
        self._recalled: set[str] = set()
        self._answered: dict[str, _Answered] = {}
        #: A worker that has just started may ask before it is seen: only one that was there can be gone.
        self._seen: set[int] = set()
        self._missing: set[int] = set()
        self._is_looking = False

    @contextmanager
    def running(self, attempts: Collection[str]) -> Iterator[None]:
        """Until its end, however late, a prefill may be recalled."""
        self._running.update(attempts)
        try:
            yield
        finally:
            self._running.difference_update(attempts)
            for attempt in self._recalled.intersection(attempts):
                self._forget_recall(attempt)

    def answered(self, asked: PhaseRequest, take_back: Callable[[], None]) -> None:
        for attempt in asked.attempts:
            if attempt in self._recalled:
                take_back()
                continue
            seconds = NOTICE_SECONDS if asked.sender is None else self._lease_seconds
            self._answered[attempt] = _Answered(asked.sender, self._clock() + seconds, take_back)
            if asked.sender is not None and asked.sender not in self._seen:
                self._seen.update({asked.sender}.intersection(self._senders()))
            self._look_later()

    def taken(self, attempts: Collection[str]) -> None:
        for attempt in attempts:
            self._answered.pop(attempt, None)

    def recall(self, attempts: Collection[str]) -> None:
        for attempt in attempts:
            if (answered := self._answered.pop(attempt, None)) is not None:
                answered.take_back()
                continue
            # It may overtake the answer that it is about.
            self._recalled.add(attempt)
            if attempt not in self._running:
                self._forget_recall(attempt)

    def look(self) -> None:
        """For decode workers that are gone since the last look; so a list that is empty for a moment says nothing."""
        now, there = self._clock(), set(self._senders())
        for attempt, answered in list(self._answered.items()):
            if answered.forgotten_at <= now:
                del self._answered[attempt]
        waiting = {each.sender for each in self._answered.values() if each.sender is not None}
        self._seen = (self._seen | there) & (waiting | there)
        missing = (waiting & self._seen) - there
        # One has to be there to fetch what another one has left.
        for gone in missing & self._missing if there else ():
            left = [attempt for attempt, each in self._answered.items() if each.sender == gone]
            log.warning("decode worker %x is gone; it had %d of this worker's handoffs", gone, len(left))
            self.recall(left)
        self._missing = missing

    def _look_later(self) -> None:
        if self._is_looking or not self._answered:
            return
        self._is_looking = True
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._is_looking = False
        self.look()
        self._look_later()

    def _forget_recall(self, attempt: str) -> None:
        asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._recalled.discard, attempt)


def recallable(prefill: PrefillPhase, recalls: Recalls, protocol: HandoffProtocol = DYNAMO) -> Generate:
    """The prefill phase as a service for decode workers."""
    hear = {"recall": recalls.recall, "taken": recalls.taken}

    async def running(request: GenerateRequest, context: RequestContext) -> Handoff:
        with recalls.running(_asked(request).attempts):
            return await prefill(request, context)

    def passed_on(request: GenerateRequest, take_back: Callable[[], None]) -> None:
        recalls.answered(_asked(request), take_back)

    phase = prefill_service(running, protocol, passed_on)

    async def notice(said: PhaseRequest) -> AsyncGenerator[TokenChunk, None]:
        hear[said.stage](said.attempts)
        for chunk in _NOTHING:
            yield chunk

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        asked = _asked(request)
        recalls.taken(asked.taken)
        return notice(asked) if asked.is_notice else phase(request, context)

    return generate


def beside_requests(notices: Generate, requests: Generate) -> Generate:
    """What a worker serves: `requests`, and what other workers say of theirs, which finds room in any worker and
    is no request to a log, a counter or a drain.
    """

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        asked = request.phase_request
        return (notices if asked is not None and asked.is_notice else requests)(request, context)

    return generate


def _asked(request: GenerateRequest) -> PhaseRequest:
    assert request.phase_request is not None, "only another worker asks for a phase"
    return request.phase_request
