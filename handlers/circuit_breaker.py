"""Calls of workers of the other role, with idle timeouts and a circuit breaker for each instance."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager
from enum import Enum
from typing import Any, NamedTuple

from trtllm_disagg.config.worker_config import ScheduleStyle, WorkerConfig
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    KvTransferError,
    PeerUnavailableError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.cancellation import Wait
from trtllm_disagg.handlers.remote import QUEUE_ID, StageClient, StageInstance, name_of
from trtllm_disagg.streams import PerRequestStream
from trtllm_disagg.tracing.spans import NO_SPAN, Span
from trtllm_disagg.types import (
    DecodePhase,
    GenerateRequest,
    Handoff,
    InProgress,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire.bodies import kind_of

log = logging.getLogger(__name__)


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
        """Instances to skip now."""
        now = self._clock()
        return frozenset(i for i, until in self._open_until.items() if now < until)

    def num_open(self) -> int:
        """The number of instances that are skipped now. May be called from any thread."""
        now = self._clock()
        return sum(now < until for until in list(self._open_until.values()))

    def failed(self, instance_id: int, sign: Sign = Sign.ANSWERS) -> None:
        count = self._failures[instance_id, sign] = self._failures.get((instance_id, sign), 0) + 1
        if count >= self._limit:
            log.warning(
                "instance %x failed %d times in a row: skipped for %g s", instance_id, count, self._seconds
            )
            self._open_until[instance_id] = self._clock() + self._seconds
            self.times_opened += 1

    def succeeded(self, instance_id: int, sign: Sign = Sign.ANSWERS) -> None:
        self._failures.pop((instance_id, sign), None)
        if all(self._failures.get((instance_id, each), 0) < self._limit for each in Sign):
            self._open_until.pop(instance_id, None)


class StreamTimeouts(NamedTuple):
    """Seconds that a called worker may be silent, before its first chunk and before each further one."""

    first: float
    #: A worker that hangs keeps its connections: only this timeout detects it.
    next: float


#: For a description, which needs no work of the engine.
_DESCRIBE_SECONDS = 5.0


def stream_timeouts_of(config: WorkerConfig) -> Mapping[str, StreamTimeouts]:
    """By `PhaseRequest.kind`, or "describe". A worker asked for a whole answer may try several others, then itself."""
    prefill = StreamTimeouts(config.prefill_timeout, config.prefill_timeout)
    decode = StreamTimeouts(first_decode_token_seconds(config), config.next_decode_token_timeout)
    tries = config.max_tries + 1
    whole = StreamTimeouts(tries * prefill.first, tries * max(decode))
    describe = StreamTimeouts(_DESCRIBE_SECONDS, _DESCRIBE_SECONDS)
    return {"prefill": prefill, "decode": decode, "whole": whole, "describe": describe}


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
        self._wait.disarm()

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
        if not self._wait.is_armed:
            return  # the next `arm` sets the timer
        if self._loop.time() < self._due:
            self._set_timer(self._due)
            return
        self._wait.end()


def _is_last(answer: Any, kind: str) -> bool:
    """Whether a call may end with this answer: one to prefill may have a handoff, and no finish reason."""
    return kind == "prefill" or (isinstance(answer, dict) and answer.get("finish_reason") is not None)


#: Errors that count as failures of the instance. Overload and a bad request do not.
_FAULTS = (PeerUnavailableError, StageTimeoutError, EngineError)


class CircuitBreakerClient:
    """A StageClient that skips failing instances and sets idle timeouts for its calls."""

    def __init__(
        self, stage: StageClient, breaker: CircuitBreaker, timeouts: Mapping[str, StreamTimeouts]
    ) -> None:
        """`timeouts`: as `stream_timeouts_of` makes them."""
        self._stage = stage
        self._breaker = breaker
        self._timeouts = timeouts
        #: Calls that wait for their first answer.
        self._unanswered = InProgress()

    def instance_ids(self) -> Collection[int]:
        return self._stage.instance_ids()

    def check(self, request: GenerateRequest) -> None:
        self._stage.check(request)

    def num_healthy(self) -> int:
        """The number of instances that are not skipped."""
        return len(set(self.instance_ids()) - self._breaker.open())

    def depth(self) -> int:
        """The number of calls by this worker that wait: those without an answer yet, beyond one for each instance."""
        return max(0, self._unanswered.count - len(self.instance_ids()))

    async def pick(self, request: GenerateRequest) -> CircuitBreakerInstance:
        """An instance that is not skipped; any instance when all are skipped, because none at all would be worse."""
        if skipped := self._breaker.open():
            request.span.event("breaker_open", {"instances": [f"{each:x}" for each in sorted(skipped)]})
        picked = await self._stage.pick(request.skipping(skipped))
        return CircuitBreakerInstance(
            picked,
            self._breaker,
            self._timeouts,
            self._unanswered,
            request.trace.root,
            counts_failures=not request.kv_may_be_fetched,
        )


class CircuitBreakerInstance:
    def __init__(
        self,
        instance: StageInstance,
        breaker: CircuitBreaker,
        timeouts: Mapping[str, StreamTimeouts],
        unanswered: InProgress,
        span: Span = NO_SPAN,
        *,
        counts_failures: bool = True,
    ) -> None:
        """`span` gets an event for each failure that counts."""
        self._span = span
        self._counts_failures = counts_failures
        self._instance = instance
        self._breaker = breaker
        self._timeouts = timeouts
        self._unanswered = unanswered

    @property
    def instance_id(self) -> int:
        return self._instance.instance_id

    async def describe(self) -> dict[str, Any]:
        """Raises StageTimeoutError, besides what the instance raises. A success does not reset the failures."""
        with self._counting_failures(), IdleTimer(lambda: self.instance_id) as timer:
            timer.arm("description", self._timeouts["describe"].first)
            return await self._instance.describe()

    async def notify(self, notice: dict[str, Any]) -> None:
        await self._instance.notify(notice)

    async def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        kind = kind_of(request)
        timeouts = self._timeouts[kind]
        further = f"further answer to {kind}"
        with self._counting_failures(), IdleTimer(lambda: self.instance_id) as timer:
            async with aclosing(self._instance.call(request, context)) as answers:
                timer.arm(f"answer to {kind}", timeouts.first)
                with self._unanswered:
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
                    self._breaker.succeeded(self.instance_id)
                elif context is None or not context.is_stopped():
                    raise PeerUnavailableError(
                        f"the answer of {name_of(self.instance_id)} to {kind} ended too early"
                    )

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        """Errors of the prefill queue itself are no failure of a worker."""
        try:
            yield
        except DisaggError as error:
            blamed = self.instance_id if error.peer is None else error.peer
            if self._counts_failures and isinstance(error, _FAULTS) and blamed != QUEUE_ID:
                self._breaker.failed(blamed)
                _note_failure(self._span, blamed, error)
            raise


def counting_lost_kv(breaker: CircuitBreaker, decode: DecodePhase) -> DecodePhase:
    """`decode` on this worker's engine. KV that does not arrive is a failure of the prefill worker that has it: its
    answers are well, and each request that is sent there would wait for the end of a transfer.
    """

    def counted(
        request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        chunks = decode(request, context, handoff)
        if handoff.sender in (None, QUEUE_ID):
            return chunks
        return _CountingLostKv(breaker, handoff.sender, request.trace.root, context, chunks)

    return counted


class _CountingLostKv(PerRequestStream[TokenChunk]):
    def __init__(
        self,
        breaker: CircuitBreaker,
        sender: int,
        span: Span,
        context: RequestContext,
        chunks: AsyncGenerator[TokenChunk, None],
    ) -> None:
        self._breaker = breaker
        self._sender = sender
        self._span = span
        self._context = context
        self._rest = chunks

    async def _first(self) -> TokenChunk:
        assert self._rest is not None
        try:
            chunk = await anext(self._rest)
        except KvTransferError as error:
            if not self._context.is_stopped():  # otherwise its sender may have released it
                self._breaker.failed(self._sender, Sign.KV_ARRIVES)
                _note_failure(self._span, self._sender, error)
            raise
        self._breaker.succeeded(self._sender, Sign.KV_ARRIVES)
        return chunk


def _note_failure(span: Span, instance_id: int, error: DisaggError) -> None:
    span.event("breaker_failure", {"instance": f"{instance_id:x}", "because": str(error)})
