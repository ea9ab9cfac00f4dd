"""The workers of the other role, as this worker calls them: which one takes a request, what is known of each, and one
call with its timeouts, its load and its blame.
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
    NoInstanceError,
    PeerUnavailableError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.cancellation import in_background
from trtllm_disagg.handlers.circuit_breaker import (
    QUEUE_ID,
    CircuitBreaker,
    IdleTimer,
    Sign,
    StreamTimeouts,
    name_of,
)
from trtllm_disagg.handlers.select import InFlight, StageClient, StageInstance
from trtllm_disagg.tracing.spans import Span
from trtllm_disagg.types import GenerateRequest, InProgress, Int32, PhaseRequest, RequestContext
from trtllm_disagg.wire.bodies import kind_of

log = logging.getLogger(__name__)


class MeetingPlace(msgspec.Struct, frozen=True):
    """Where a prefill worker's engine is met, and on which rank."""

    ctx_info_endpoint: str | None = None
    ctx_dp_rank: Int32 | None = None


class _Known(NamedTuple):
    """What an instance has said of itself."""

    fits: bool
    facts: EngineFacts
    description: dict[str, Any]
    said_at: float


#: A description takes one round trip. An instance that takes longer has a fault, which the call's own timeout detects.
_DESCRIBE_SECONDS = 1.0
#: A description counts for so long: under Kubernetes a restarted pod has the id of the one before it.
_FRESH_SECONDS = 10.0
#: Peers are looked at one by one no more often, and no more of them asked again at once.
_LOOK_SECONDS, _MOST_ASKED = 0.5, 16
_UNKNOWN = EngineFacts()
_NOTHING_KNOWN = _Known(True, _UNKNOWN, {}, 0.0)

#: Errors that count as failures of the instance. Overload and a bad request do not.
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
        """`timeouts`: as `stream_timeouts_of` makes them. `require_fit` raises ConfigError for the description of an
        instance that this worker cannot serve with; None: all fit. `prefill`: false for decode workers, which compute
        no prompt.
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
        #: The instances in discovery at the last look at each of them, and when to look again.
        self._learned: Collection[int] = ()
        self._look_at = 0.0
        #: Instances that are asked for their description now.
        self._asked: set[int] = set()
        #: Calls that wait for their first answer.
        self.unanswered = InProgress()

    def instance_ids(self) -> Collection[int]:
        """The instances in discovery that fit this worker, as far as they are known."""
        there = self._stage.instance_ids()
        return [each for each in there if each not in self._unfit] if self._unfit else there

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidRequestError when the request pins an instance that never existed."""
        self._stage.check(request)

    def num_healthy(self) -> int:
        """The number of instances that are not skipped."""
        return len(set(self.instance_ids()) - self.breaker.open())

    def depth(self) -> int:
        """The number of calls by this worker that wait: those without an answer yet, beyond one for each instance."""
        return max(0, self.unanswered.count - len(self.instance_ids()))

    def facts(self) -> Sequence[EngineFacts]:
        """Those of the engines of all instances in discovery that fit, each once: a thousand peers have a few."""
        known = self._known
        return list(
            {(known[each].facts if each in known else _UNKNOWN): None for each in self.instance_ids()}
        )

    async def learn(self) -> None:
        """Ask each instance that is new in discovery for its description, once. Those known for long are asked again,
        while the request goes on.
        """
        there, now = self._stage.instance_ids(), self._clock()
        # A request that comes while another one asks a new instance waits for the description, too.
        if there == self._learned and now < self._look_at and len(self._known) >= len(there):
            return
        self._learned, self._look_at = list(there), now + _LOOK_SECONDS
        if len(self._known) > len(there):
            present = set(there)
            for gone in self._known.keys() - present:
                self.in_flight.weights.set(gone, None)
            self._known = {each: known for each, known in self._known.items() if each in present}
            self._unfit &= present
        new = [each for each in there if each not in self._known and each != QUEUE_ID]
        if new:
            await asyncio.gather(*(self._ask(self._stage.instance(each)) for each in new))
        stale = now - _FRESH_SECONDS
        for each in there:
            if len(self._asked) == _MOST_ASKED:
                break  # of many peers some are asked later
            if each not in self._asked and (known := self._known.get(each)) and known.said_at < stale:
                self._asked.add(each)
                in_background(self._ask(self._stage.instance(each)), "question for a description")

    async def pick(self, request: GenerateRequest) -> Call:
        """A call of an instance that is not skipped; of any instance when all are skipped, because none at all would be
        worse. Raises NoInstanceError when none can take this request.
        """
        if skipped := self.breaker.open():
            request.span.event("breaker_open", {"instances": [f"{each:x}" for each in sorted(skipped)]})
        request = request.skipping(skipped)
        while True:
            instance = await self._stage.pick(request)
            if instance.instance_id not in self._known and instance.instance_id != QUEUE_ID:
                await self._ask(instance)
            known = self._known.get(instance.instance_id)
            if known is None or (
                known.fits and not known.facts.why_unfit(request, computes_prompt=self._prefill)
            ):
                return Call(self, instance, request)
            request = request.avoiding(instance.instance_id)

    def call_of(self, instance_id: int, request: GenerateRequest) -> Call:
        """A call of this instance. Raises NoInstanceError when it is gone, or is skipped or avoided."""
        if instance_id not in set(self.instance_ids()) - self.breaker.open() - request.avoid:
            raise NoInstanceError(f"instance {instance_id:x} is gone, or has failed")
        return Call(self, self._stage.instance(instance_id), request)

    def meeting_place(self, instance: Call) -> tuple[str, int | None]:
        """Where the instance's engine is met, and on which rank. Raises PeerUnavailableError."""
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
        """A failure of the prefill worker that has it, although its answers are well: each request that is sent there
        would wait for the end of a transfer.
        """
        self.forget(sender)
        self.breaker.failed(sender, Sign.KV_ARRIVES)
        _note_failure(request.trace.root, sender, error)

    def forget(self, instance_id: int) -> None:
        """It did not answer, or its KV did not come: another process may have its id now."""
        self._known.pop(instance_id, None)
        self._unfit.discard(instance_id)
        self._look_at = 0.0

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
            # The call itself will fail with the reason. What it said before counts until it is asked again.
            pass
        finally:
            self._asked.discard(instance.instance_id)
        facts = EngineFacts.described(description)
        self._known[instance.instance_id] = _Known(fits, facts, description, self._clock())
        (self._unfit.discard if fits else self._unfit.add)(instance.instance_id)
        # A prompt fills a step of any size: only decode workers do as much at once as they have slots.
        if not self._prefill:
            self.in_flight.weights.set(instance.instance_id, facts.slots)


class Call:
    """One instance that was picked for a request. `with` it, the reader of its answer blames the instance for an error:
    an answer that is of no use is a failure of the instance, too.
    """

    def __init__(self, peers: Peers, instance: StageInstance, request: GenerateRequest) -> None:
        self._peers = peers
        self.instance = instance
        self._span = request.trace.root
        self._tokens = len(request.token_ids)
        # A drain may find KV that was fetched already: no failure of the instance that is asked.
        self._counts_failures = not request.kv_may_be_fetched

    @property
    def instance_id(self) -> int:
        """It may change: the prefill queue hands the request on."""
        return self.instance.instance_id

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Errors of the prefill queue itself are no failure of a worker."""
        if not isinstance(error, DisaggError):
            return
        blamed = self.instance_id if error.peer is None else error.peer
        if isinstance(error, (PeerUnavailableError, HandoffRefusedError)):
            error.peer = blamed
            self._peers.forget(blamed)
        if self._counts_failures and isinstance(error, _FAULTS) and blamed != QUEUE_ID:
            self._peers.breaker.failed(blamed)
            _note_failure(self._span, blamed, error)

    async def answers(
        self, body: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The worker's answers to `body`. Raises a DisaggError; StageTimeoutError when it is silent for too long."""
        kind = kind_of(body)
        timeouts, peers = self._peers.timeouts[kind], self._peers
        further = f"further answer to {kind}"
        leave = peers.in_flight.enter(self.instance_id, self._tokens)
        try:
            with IdleTimer(lambda: self.instance_id) as timer:
                async with aclosing(self.instance.call(body, context)) as answers:
                    timer.arm(f"answer to {kind}", timeouts.first)
                    with peers.unanswered:
                        answer = await anext(answers, None)
                    if answer is not None:
                        timer.disarm()
                        yield answer
                        timer.arm(further, timeouts.next)
                        async for answer in answers:
                            timer.disarm()
                            yield answer
                            timer.arm(further, timeouts.next)
                    if answer is not None and _is_last(answer, kind):
                        peers.breaker.succeeded(self.instance_id)
                    elif context is None or not context.is_stopped():
                        raise PeerUnavailableError(
                            f"the answer of {name_of(self.instance_id)} to {kind} ended too early"
                        )
        finally:
            leave()


def _is_last(answer: Any, kind: str) -> bool:
    """Whether a call may end with this answer: one to prefill may have a handoff, and no finish reason."""
    return kind == "prefill" or (isinstance(answer, dict) and answer.get("finish_reason") is not None)


def _note_failure(span: Span, instance_id: int, error: DisaggError) -> None:
    span.event("breaker_failure", {"instance": f"{instance_id:x}", "because": str(error)})


async def select_instance(peers: Peers, request: GenerateRequest, fact: str) -> Call:
    """`fact`: its name in the request trace."""
    with request.span.child("select") as span:
        call = await peers.pick(request.within(span))
        span.note({"instance": f"{call.instance_id:x}"})
        if call.instance_id != QUEUE_ID:  # otherwise the worker's claim records its id
            request.trace.facts[fact] = f"{call.instance_id:x}"
        return call


def dispatch_span(call: Call, request: GenerateRequest) -> Span:
    """The span from the call of an instance to its first answer, parent of that worker's spans."""
    return request.span.child("dispatch", {"instance": f"{call.instance_id:x}"})


PREFILL, DECODE = PhaseRequest("prefill"), PhaseRequest("decode")
