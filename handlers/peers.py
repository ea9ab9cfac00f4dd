"""Calls this worker's peers: picks one for a request, remembers each one's description, and runs the call with its
timeouts, load and blame.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    EngineError,
    HandoffRefusedError,
    PeerUnavailableError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker, Sign
from trtllm_disagg.handlers.drain import in_background
from trtllm_disagg.handlers.idle_timeout import IdleTimer, StreamTimeouts
from trtllm_disagg.handlers.selection import InFlight, StageClient, StageInstance
from trtllm_disagg.tracing.spans import Span
from trtllm_disagg.types import GenerateRequest, InProgress, Int32, PhaseRequest, RequestContext
from trtllm_disagg.wire.bodies import phase_of

log = logging.getLogger(__name__)


class MeetingPlace(msgspec.Struct, frozen=True):
    """The endpoint and rank where decode meets a prefill engine."""

    ctx_info_endpoint: str | None = None
    ctx_dp_rank: Int32 | None = None


class _Known(NamedTuple):
    """An instance's description."""

    fits: bool
    facts: EngineFacts
    description: dict[str, Any]
    said_at: float


#: Seconds for a description, one round trip. A slower instance is faulty, which the call's own timeout detects.
_DESCRIBE_SECONDS = 1.0
#: Seconds that a description counts: under Kubernetes a restarted pod keeps its id.
_FRESH_SECONDS = 10.0
#: Seconds between two looks at each peer, and the number of peers asked again at once.
_LOOK_SECONDS, _MAX_ASKED = 0.5, 16
_UNKNOWN = EngineFacts()
_NOTHING_KNOWN = _Known(True, _UNKNOWN, {}, 0.0)

#: Errors that count against the instance. Overload and a bad request do not.
_FAULTS = (PeerUnavailableError, HandoffRefusedError, StageTimeoutError, EngineError)


class Peers:
    def __init__(
        self,
        stage: StageClient,
        breaker: CircuitBreaker,
        timeouts: Mapping[str, StreamTimeouts],
        in_flight: InFlight | None = None,
        require_fit: Callable[[dict[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        prefill: bool = True,
    ) -> None:
        """`timeouts`: from `stream_timeouts_of`. `require_fit` raises ConfigError for the description of an instance
        that does not fit this worker; None: all fit. `prefill`: whether the peers are prefill workers, which compute
        prompts.
        """
        self._stage = stage
        self.breaker = breaker
        self.timeouts = timeouts
        self.in_flight = in_flight or InFlight()
        self._require_fit = require_fit
        self._clock = clock
        self._prefill = prefill
        self._known: dict[int, _Known] = {}
        #: Those known not to fit.
        self._unfit: set[int] = set()
        #: The instances at the last look at each of them, and when to look again.
        self._learned: Collection[int] = ()
        self._look_at = 0.0
        #: Instances that are being asked for their description.
        self._asked: set[int] = set()
        #: Calls without an answer so far.
        self.unanswered = InProgress()

    def instance_ids(self) -> Collection[int]:
        """The instances in discovery that are not known to misfit."""
        there = self._stage.instance_ids()
        return [each for each in there if each not in self._unfit] if self._unfit else there

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidRequestError when the request pins an instance that never existed."""
        self._stage.check(request)

    def num_healthy(self) -> int:
        """The number of instances that are not skipped."""
        return len(set(self.instance_ids()) - self.breaker.open())

    def depth(self) -> int:
        """The number of this worker's calls without an answer, beyond one per instance."""
        return max(0, self.unanswered.count - len(self.instance_ids()))

    def facts(self) -> Sequence[EngineFacts]:
        """Distinct facts of the fitting instances' engines: few even with 1,000 peers."""
        known = self._known
        return list(
            {(known[each].facts if each in known else _UNKNOWN): None for each in self.instance_ids()}
        )

    async def learn(self) -> None:
        """Ask each new instance once for its description, and wait for it. Old descriptions are renewed in the
        background.
        """
        there, now = self._stage.instance_ids(), self._clock()
        # Further requests wait for the same description.
        if there == self._learned and now < self._look_at and len(self._known) >= len(there):
            return
        self._learned, self._look_at = list(there), now + _LOOK_SECONDS
        if len(self._known) > len(there):
            present = set(there)
            for gone in self._known.keys() - present:
                self.in_flight.weights.set(gone, None)
            self._known = {each: known for each, known in self._known.items() if each in present}
            self._unfit &= present
        new = [each for each in there if each not in self._known]
        if new:
            await asyncio.gather(*(self._ask(self._stage.instance(each)) for each in new))
        stale = now - _FRESH_SECONDS
        for each in there:
            if len(self._asked) == _MAX_ASKED:
                break  # the others are asked at a later look
            if each not in self._asked and (known := self._known.get(each)) and known.said_at < stale:
                self._asked.add(each)
                in_background(self._ask(self._stage.instance(each)), "query of a description")

    async def pick(self, request: GenerateRequest, offered: int | None = None) -> Call:
        """A call of an instance that is not skipped; if all are skipped, of any. Raises NoInstanceError if none can
        take this request. `offered`: one of `takers`, which has room.
        """
        if skipped := self.breaker.open():
            request.span.event("breaker_open", {"instances": [f"{each:x}" for each in sorted(skipped)]})
        request = request.skipping(skipped)
        while True:
            instance = await self._stage.pick(request) if offered is None else self._stage.instance(offered)
            if instance.instance_id not in self._known:
                await self._ask(instance)
            if self._fits(instance.instance_id, request):
                return Call(self, instance, request)
            request, offered = request.avoiding(instance.instance_id), None

    def takers(self, request: GenerateRequest) -> Collection[int]:
        """The instances that may get this request: the unskipped ones; if all are skipped, all."""
        possible = {each for each in self.instance_ids() if self._fits(each, request)} - request.avoid
        return possible - request.skipped - self.breaker.open() or possible

    def meeting_place(self, instance: Call) -> tuple[str, int | None]:
        """The endpoint and rank where decode meets the instance's engine. Raises PeerUnavailableError."""
        known = self._known.get(instance.instance_id)
        try:
            place = msgspec.convert(known.description if known else {}, MeetingPlace)
        except msgspec.ValidationError as error:
            raise PeerUnavailableError(f"the prefill worker's description is unreadable: {error}") from None
        if not place.ctx_info_endpoint:
            raise PeerUnavailableError("the prefill worker's engine has no ctx_info_endpoint")
        return place.ctx_info_endpoint, place.ctx_dp_rank

    def kv_arrived(self, sender: int) -> None:
        self.breaker.succeeded(sender, Sign.KV_ARRIVES)

    def kv_was_lost(self, sender: int, request: GenerateRequest, error: DisaggError) -> None:
        """Count a failure of the prefill worker, although it answers: each further request to it would wait for its KV
        in vain.
        """
        self.forget(sender)
        self.breaker.failed(sender, Sign.KV_ARRIVES)
        _note_failure(request.trace.root, sender, error)

    def forget(self, instance_id: int) -> None:
        """Forget its description after a failure: another process may have its id now."""
        self._known.pop(instance_id, None)
        self._unfit.discard(instance_id)
        self._look_at = 0.0

    def _fits(self, instance_id: int, request: GenerateRequest) -> bool:
        known = self._known.get(instance_id, _NOTHING_KNOWN)
        return known.fits and not known.facts.why_unfit(request, computes_prompt=self._prefill)

    async def _ask(self, instance: StageInstance) -> None:
        known = self._known.get(instance.instance_id, _NOTHING_KNOWN)
        description, fits = known.description, known.fits
        try:
            async with asyncio.timeout(_DESCRIBE_SECONDS):
                description = await instance.describe()
                if self._require_fit is not None:
                    self._require_fit(description)
                fits = True
        except ConfigError as error:
            if known.fits:
                log.error("instance %x is not called: %s", instance.instance_id, error)
            fits = False
        except (DisaggError, TimeoutError):
            # The call itself will fail with the reason. Until the next query the old description counts.
            pass
        finally:
            self._asked.discard(instance.instance_id)
        facts = EngineFacts.described(description)
        self._known[instance.instance_id] = _Known(fits, facts, description, self._clock())
        (self._unfit.discard if fits else self._unfit.add)(instance.instance_id)
        # One prompt fills a prefill step: only decode workers have weights, by their slots.
        if not self._prefill:
            self.in_flight.weights.set(instance.instance_id, facts.slots)


class Call:
    """A call of the instance picked for a request. Errors raised in its `with` block, also for a useless answer, are
    blamed on the instance.
    """

    def __init__(self, peers: Peers, instance: StageInstance, request: GenerateRequest) -> None:
        self._peers = peers
        self.instance = instance
        self.instance_id = instance.instance_id
        self._span = request.trace.root
        self._tokens = request.num_prompt
        # A drain may find its KV already fetched: that is no failure of this instance.
        self._counts_failures = not request.kv_may_be_fetched

    def __enter__(self) -> Call:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, DisaggError):
            return
        blamed = self.instance_id if error.peer is None else error.peer
        if isinstance(error, (PeerUnavailableError, HandoffRefusedError)):
            error.peer = blamed
            self._peers.forget(blamed)
        if self._counts_failures and isinstance(error, _FAULTS):
            self._peers.breaker.failed(blamed)
            _note_failure(self._span, blamed, error)

    async def answers(
        self, body: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the worker's answers to `body`. Raises a DisaggError; StageTimeoutError if it is silent too long."""
        phase = phase_of(body)
        timeouts, peers = self._peers.timeouts[phase], self._peers
        further = f"further answer to {phase}"
        leave = peers.in_flight.enter(self.instance_id, self._tokens)
        try:
            with IdleTimer(self.instance_id) as timer:
                async with aclosing(self.instance.call(body, context)) as answers:
                    timer.start(f"answer to {phase}", timeouts.first)
                    with peers.unanswered:
                        answer = await anext(answers, None)
                    if answer is not None:
                        timer.disarm()
                        yield answer
                        timer.start(further, timeouts.next)
                        async for answer in answers:
                            timer.disarm()
                            yield answer
                            timer.start(further, timeouts.next)
                    if answer is not None and _is_last(answer, phase):
                        peers.breaker.succeeded(self.instance_id)
                    elif context is None or not context.is_stopped():
                        raise PeerUnavailableError(
                            f"the answer of instance {self.instance_id:x} to {phase} ended too early"
                        )
        finally:
            leave()


def _is_last(answer: Any, phase: str) -> bool:
    """Whether a call may end with this answer. A prefill's answer may have a handoff and no finish reason."""
    return phase == "prefill" or (isinstance(answer, dict) and answer.get("finish_reason") is not None)


def _note_failure(span: Span, instance_id: int, error: DisaggError) -> None:
    span.event("breaker_failure", {"instance": f"{instance_id:x}", "because": str(error)})


async def select_instance(
    peers: Peers, request: GenerateRequest, fact: str, offered: int | None = None
) -> Call:
    """`fact`: its name in the request trace. `offered`: as for `Peers.pick`."""
    with request.span.child("select") as span:
        call = await peers.pick(request.within(span), offered)
        span.note({"instance": f"{call.instance_id:x}"})
        request.trace.facts[fact] = f"{call.instance_id:x}"
        return call


def dispatch_span(call: Call, request: GenerateRequest) -> Span:
    """The span from the call to its first answer; parent of the called worker's spans."""
    return request.span.child("dispatch", {"instance": f"{call.instance_id:x}"})


PREFILL, DECODE = PhaseRequest("prefill"), PhaseRequest("decode")
