"""One request while it runs on this worker, and what counts it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec

from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    InvalidRequestError,
    NoInstanceError,
    OverloadedError,
    PeerUnavailableError,
    StageTimeoutError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.admission import Admission
from trtllm_disagg.handlers.attempts import LOCAL, Attempt, Plan
from trtllm_disagg.handlers.cancellation import WorkerDrain
from trtllm_disagg.handlers.circuit_breaker import name_of
from trtllm_disagg.handlers.delivered import Delivered
from trtllm_disagg.handlers.trace import RequestLog
from trtllm_disagg.tracing.spans import NO_SPAN
from trtllm_disagg.types import GenerateRequest, InProgress, RequestContext, TokenChunk

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunCounts:
    """What counts and records each request of a worker."""

    #: Refuses a request that finds no room.
    admission: Admission
    log: RequestLog = field(default_factory=RequestLog)
    #: Ends the requests of a worker that leaves.
    drain: WorkerDrain = field(default_factory=WorkerDrain)
    #: The requests of frontends; `switch` waits until an old first stage has none.
    whole_requests: InProgress = field(default_factory=InProgress)


class Run:
    """One request while it runs on this worker: what its client has, which attempts have failed, and all that counts
    it. A step makes a handoff of its own; an instance that has failed is not called again for this request.
    """

    def __init__(
        self,
        request: GenerateRequest,
        context: RequestContext,
        plan: Plan,
        delivered: Delivered,
        counts: RunCounts,
        link: dict[str, str] | None = None,
    ) -> None:
        """`link`: for the worker that goes on after a migration; it leaves with the first chunk."""
        self._context = context
        self._plan = plan
        self._counts = counts
        self._link = link
        self.delivered = delivered
        #: The request, which avoids the instances that have failed.
        self.request = request
        self._attempts: list[Attempt] | None = None
        #: The error that the request fails with when no attempt is left.
        self._error: DisaggError | None = None
        self._failed_to = ""
        #: For the log: the strategy, or the fallback step.
        self._failed_name = ""
        #: The last attempt has found no instance, or this worker's own engine was too slow or too full.
        self._would_fail_again = False
        self._has_lost_engine = False
        self._is_first = True
        self._span = NO_SPAN
        self._choices_left = request.num_choices
        #: End the count of the waiting requests, of the attempt, and of what waits for a token of it.
        self._leave_queue = self._leave_attempt = self._leave_at_first = _nothing

    # -- what counts it

    def __enter__(self) -> Run:
        """Raises OverloadedError, WorkerLeavingError."""
        counts = self._counts
        self._drain = counts.drain
        self._wait = counts.drain.enter()
        try:
            self._leave_queue = counts.admission.enter(len(self.request.token_ids))
        except BaseException:
            counts.drain.leave(self._wait)
            raise
        self._is_from_frontend = self.request.phase_request is None
        counts.whole_requests.count += self._is_from_frontend
        self._record = counts.log.begin(self.request, self._context)
        self._wait.arm()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        counts, ending = self._counts, error
        was_cut = isinstance(error, asyncio.CancelledError) and self._wait.was_ended(error)
        # A runtime that shuts down stops all contexts: the phases ended as if the client had left.
        if was_cut or (error is None and counts.drain.has_begun and not self.is_over):
            ending = counts.drain.error()
        self._end_attempt(error)
        self._leave_queue()
        self._record.end(ending)
        counts.whole_requests.count -= self._is_from_frontend
        counts.drain.leave(self._wait)
        if ending is not error and ending is not None:
            raise ending from None

    @property
    def is_over(self) -> bool:
        """The client has the end of the answer."""
        return self._choices_left <= 0

    def saw(self, chunk: TokenChunk) -> TokenChunk:
        """Record a chunk, and return what the client gets of it."""
        self._wait.waiting = None
        if chunk.finish_reason is not None:
            self._choices_left -= 1
        if self._is_first:
            chunk = self._saw_first(chunk)
        return self._record.on_chunk(chunk)

    def _saw_first(self, chunk: TokenChunk) -> TokenChunk:
        self._is_first = False
        leave, self._leave_queue = self._leave_queue, _nothing
        leave()
        leave, self._leave_at_first = self._leave_at_first, _nothing
        leave()
        if self._link is None or chunk.finish_reason is not None:
            return chunk
        # In the first chunk only: in every chunk it would cost 0.1 kB a token.
        return msgspec.structs.replace(chunk, worker_trace_link=self._link)

    def goes_on(self) -> None:
        """The client has the chunk. Raises WorkerLeavingError when this worker does not make the next one."""
        if self._choices_left > 0:
            if self._drain.is_over:
                raise self._drain.error()
            self._wait.arm()

    def end_chunk(self) -> TokenChunk:
        """The finish reason that the client lacks."""
        if not self.request.trace.strategy:
            self.request.trace.chose(LOCAL, "nothing_left")
        return self.delivered.end_chunk(self.request)

    # -- its attempts

    @property
    def has_nothing_left(self) -> bool:
        """The client lacks nothing but the finish reason."""
        return self.delivered.is_complete(self.request)

    async def next_attempt(self) -> Attempt:
        """The next one that is not in vain. Raises the error of the failed ones when there is none."""
        if self._attempts is None:
            self._attempts = list(await self._plan.attempts(self.request))
        while self._attempts:
            attempt = self._attempts.pop(0)
            is_in_vain = self._would_fail_again and self._failed_to == attempt.to
            if attempt.without_engine is self._has_lost_engine and not is_in_vain:
                return attempt
        raise self._error or PeerUnavailableError("no worker can answer this request")

    def begin(self, attempt: Attempt) -> AsyncGenerator[TokenChunk, None]:
        """The attempt's chunks. Raises OverloadedError when it has no room."""
        if self._error is not None:
            self._fall_back(attempt, self._error)
        request = self.delivered.begin(self.request)
        if attempt.enter is not None and attempt.until_first:
            self._leave_at_first = attempt.enter(request)
        elif attempt.enter is not None:
            self._leave_attempt = attempt.enter(request)
        return attempt.chunks(request.within(self._span), self._context)

    def _fall_back(self, attempt: Attempt, error: DisaggError) -> None:
        request, trace = self.request, self.request.trace
        where = "" if error.peer is None else f" at {name_of(error.peer)}"
        log.warning(
            "request %s: %s failed after %d tokens%s (%s); trying %s",
            *(self._context.id(), self._failed_name, len(self.delivered.tokens), where, error, attempt.to),
        )
        trace.fell_back(attempt.to, error)
        if error.peer is not None:
            trace.forget(error.peer)
        trace.strategy = attempt.strategy or trace.strategy
        self._span = request.span.child("fallback", {"to": attempt.to, "because": str(error)})

    def _end_attempt(self, error: BaseException | None) -> None:
        self._span.end(error)
        for leave in (self._leave_attempt, self._leave_at_first):
            leave()
        self._leave_attempt = self._leave_at_first = _nothing

    def failed(self, attempt: Attempt, error: DisaggError) -> None:
        """Raises the error with which the request ends, unless another attempt may answer it."""
        self._end_attempt(error)
        if self.delivered.are_appended and isinstance(error, InvalidRequestError):
            # The request is valid: the engine refuses it with the tokens that were appended to its prompt.
            raise self._error or EngineError(f"the answer cannot be continued: {error}") from None
        # A worker that is over hands its requests back to the frontend, and tries nothing more.
        if self._drain.is_over or self._context.is_stopped() or not _may_go_on(error):
            raise error
        self._failed_to = attempt.to
        self._failed_name = attempt.to if self._error is not None else self.request.trace.strategy
        found_no_instance = isinstance(error, NoInstanceError)
        is_own = isinstance(error, (StageTimeoutError, OverloadedError)) and error.peer is None
        self._would_fail_again = found_no_instance or is_own
        # The failure of the last instance is a better reason than that there is no other one.
        if self._error is None or not found_no_instance:
            self._error = error
        self._has_lost_engine = self._has_lost_engine or isinstance(error, WorkerLeavingError)
        if error.peer is not None:
            self.request = self.request.avoiding(error.peer)


def _may_go_on(error: DisaggError) -> bool:
    if isinstance(error, EngineError):  # only if another worker's engine failed
        return error.peer is not None
    return isinstance(error, (PeerUnavailableError, StageTimeoutError, OverloadedError, WorkerLeavingError))


def _nothing() -> None:
    """It was not counted, or is counted no more."""
