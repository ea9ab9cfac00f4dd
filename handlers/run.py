"""Runs one request on this worker, and counts it."""

from __future__ import annotations

import asyncio
import logging
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
from trtllm_disagg.handlers.attempts import FIRST, LOCAL, Attempt, Plan
from trtllm_disagg.handlers.choices import behind_the_first
from trtllm_disagg.handlers.delivered import Delivered
from trtllm_disagg.handlers.drain import WorkerDrain
from trtllm_disagg.handlers.multi_turn import NextTurns
from trtllm_disagg.handlers.trace import RequestLog
from trtllm_disagg.tracing.spans import NO_SPAN
from trtllm_disagg.types import Generate, GenerateRequest, InProgress, RequestContext, TokenChunk
from trtllm_disagg.wire.migration_link import MigrationLink

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Counts and records each request of a worker."""

    #: Refuses requests while it is full.
    admission: Admission
    log: RequestLog = field(default_factory=RequestLog)
    #: Ends a leaving worker's requests.
    drain: WorkerDrain = field(default_factory=WorkerDrain)
    #: Requests of frontends: `switch` waits until an old first stage has none.
    client_requests: InProgress = field(default_factory=InProgress)


class Run:
    """One running request: what its client has, which attempts failed, and its counters. Each attempt makes a new
    handoff, and does not call instances that failed this request.
    """

    def __init__(
        self,
        request: GenerateRequest,
        context: RequestContext,
        plan: Plan,
        delivered: Delivered,
        counts: RunCounts,
        next_turns: NextTurns,
        link: MigrationLink | None = None,
    ) -> None:
        """`link` goes out with the first chunk, for the worker that resumes the request after a migration."""
        self._context = context
        self._plan = plan
        self._counts = counts
        self._next_turns = next_turns
        self._link = link
        self.delivered = delivered
        #: The request; it avoids instances that failed it.
        self.request = request
        self._attempts: list[Attempt] | None = None
        #: Raised when no attempt is left.
        self._error: DisaggError | None = None
        self._failed_chunks: Generate | None = None
        #: For the log: the strategy, or the fallback step.
        self._failed_name = ""
        #: The last attempt found no instance, or this worker's engine was too slow or too full.
        self._would_fail_again = False
        self._has_lost_engine = False
        self._is_first = True
        self._span = NO_SPAN
        #: The client has the end of the answer.
        self.is_over = False
        #: Undo the queue, attempt and first-token counters.
        self._leave_queue = self._leave_attempt = self._leave_at_first = _nothing

    # -- what counts it

    def __enter__(self) -> Run:
        """Raises OverloadedError, WorkerLeavingError."""
        counts = self._counts
        self._drain = counts.drain
        self._wait = counts.drain.enter()
        try:
            self._leave_queue = counts.admission.enter(self.request)
        except BaseException:
            counts.drain.leave(self._wait)
            raise
        self._is_from_frontend = self.request.phase_request is None
        counts.client_requests.count += self._is_from_frontend
        self._record = counts.log.begin(self.request, self._context)
        self.request = self.request.within(self.request.trace.root)
        self._wait.start()
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        counts, ending = self._counts, error
        was_cut = isinstance(error, asyncio.CancelledError) and self._wait.was_ended(error)
        # A runtime that shuts down stops all contexts, so the phases ended as if the client had left.
        if was_cut or (error is None and counts.drain.has_begun and not self.is_over):
            ending = counts.drain.error()
        self._end_attempt(error)
        self._leave_queue()
        if ending is None and (self.is_over or self.request.may_end_at_frontend):
            self._next_turns.answered(self.request, self.delivered.tokens)
        self._record.end(ending)
        counts.client_requests.count -= self._is_from_frontend
        counts.drain.leave(self._wait)
        if ending is not error and ending is not None:
            raise ending from None

    def saw(self, chunk: TokenChunk) -> TokenChunk:
        """Record a chunk and return the client's version of it."""
        self._wait.waiting = None
        if chunk.finish_reason is not None:
            self.is_over = True
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
        # Only in the first chunk: in each it would cost 0.1 kB a token.
        return msgspec.structs.replace(chunk, worker_trace_link=self._link.encode())

    def goes_on(self) -> None:
        """The client has the chunk. Raises WorkerLeavingError if another worker must generate the next."""
        if not self.is_over:
            if self._drain.is_over:
                raise self._drain.error()
            self._wait.start()

    def end_chunk(self) -> TokenChunk:
        """The finish reason that the client lacks."""
        if not self.request.trace.strategy:
            self.request.trace.chose(LOCAL, "nothing_left")
        return self.delivered.end_chunk(self.request)

    # -- its attempts

    @property
    def has_nothing_left(self) -> bool:
        """The client lacks only the finish reason."""
        return self.delivered.is_complete(self.request)

    async def next_attempt(self) -> Attempt:
        """The next attempt that may succeed. Raises the failed ones' error if there is none."""
        if self._attempts is None:
            self.request = await behind_the_first(self.request)
            self._attempts = list(await self._plan.attempts(self.request))
            await self._next_turns.ready(self.request)
        while self._attempts:
            attempt = self._attempts.pop(0)
            would_fail = self._would_fail_again and self._failed_chunks is attempt.chunks
            if attempt.without_engine is self._has_lost_engine and not would_fail:
                return attempt
        raise self._error or PeerUnavailableError("no worker can answer this request")

    def begin(self, attempt: Attempt) -> GenerateRequest:
        """The attempt's request for what the client lacks. Raises OverloadedError if the attempt has no room."""
        if self._error is not None:
            self._fall_back(attempt, self._error)
        request = self.delivered.begin(self.request)
        if attempt.enter is not None and attempt.until_first:
            self._leave_at_first = attempt.enter(request)
        elif attempt.enter is not None:
            self._leave_attempt = attempt.enter(request)
        return request.within(self._span)

    def _fall_back(self, attempt: Attempt, error: DisaggError) -> None:
        request, trace = self.request, self.request.trace
        where = "" if error.peer is None else f" at instance {error.peer:x}"
        log.warning(
            "request %s: %s failed after %d tokens%s (%s); trying %s",
            *(self._context.id(), self._failed_name, len(self.delivered.tokens), where, error, attempt.name),
        )
        trace.fell_back(attempt.name, error)
        if error.peer is not None:
            trace.forget(error.peer)
        trace.strategy = attempt.strategy or trace.strategy
        self._span = request.span.child("fallback", {"to": attempt.name, "because": str(error)})

    def _end_attempt(self, error: BaseException | None) -> None:
        self._span.end(error)
        for leave in (self._leave_attempt, self._leave_at_first):
            leave()
        self._leave_attempt = self._leave_at_first = _nothing

    def failed(self, attempt: Attempt, error: DisaggError) -> None:
        """Raises the request's final error, unless another attempt may answer it."""
        self._end_attempt(error)
        if self.delivered.are_appended and isinstance(error, InvalidRequestError):
            # The request is valid: the engine refuses only the tokens appended to its prompt.
            raise self._error or EngineError(f"the answer cannot be continued: {error}") from None
        # A worker that is over gives its requests back to the frontend without another attempt.
        if self._drain.is_over or self._context.is_stopped() or not _may_go_on(error):
            raise error
        self._failed_chunks = attempt.chunks
        self._failed_name = self.request.trace.strategy if attempt.name == FIRST else attempt.name
        found_no_instance = isinstance(error, NoInstanceError)
        is_own = isinstance(error, (StageTimeoutError, OverloadedError)) and error.peer is None
        self._would_fail_again = found_no_instance or is_own
        # The last instance's failure explains more than "no instance".
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
    """There is no counter to undo."""
