"""The engine core: takes requests, runs steps, returns tokens. `core_process.py` has the sockets and the process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from trtllm_disagg.engines.embedded.connector.connector import (
    BlocksQuarantined,
    BlocksReleased,
    BlocksRestored,
    HandedOff,
    KvArrived,
    KvConnector,
    KvEvent,
    KvFailed,
    Offered,
    PrefixArrived,
    ReadEnded,
)
from trtllm_disagg.engines.embedded.core.image_queue import ImageQueue
from trtllm_disagg.engines.embedded.ipc.messages import (
    AddRequest,
    LogprobEntry,
    Ready,
    StepReport,
    TokenOutput,
)
from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager
from trtllm_disagg.engines.embedded.model.rows import Sampled
from trtllm_disagg.engines.embedded.scheduler.capacity import require_room
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row, Scheduler
from trtllm_disagg.engines.embedded.scheduler.sequence import Clock, Sequence, Status, Verdict, judge
from trtllm_disagg.engines.embedded.scheduler.statistics import IterationStats
from trtllm_disagg.errors import DisaggError, EngineError, KvTransferError

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.model.guided_decoding import Guides
log = logging.getLogger(__name__)


def of_sequence(sequence: Sequence, verdict: Verdict) -> TokenOutput:
    """The sequence's unsent tokens and their verdict."""
    num_unsent, logprobs = sequence.num_unsent, sequence.unsent_logprobs
    sequence.num_unsent, sequence.unsent_logprobs = 0, []
    end, timer = len(sequence.tokens), sequence.timer
    is_over = verdict.finish_reason is not None
    return TokenOutput(
        sequence.request_id,
        sequence.index,
        token_ids=sequence.tokens[end - num_unsent : end if verdict.emit else end - 1],
        logprobs=(logprobs if verdict.emit else logprobs[:-1]) or None,
        prompt_logprobs=sequence.prompt_logprobs if 0 < num_unsent == sequence.num_output else [],
        num_steps=max(1, num_unsent),
        trim=verdict.trim,
        finish_reason=verdict.finish_reason,
        stop_reason=verdict.stop_reason,
        cached_tokens=sequence.num_cached,
        measured=timer.snapshot(sequence.admission) if is_over and timer is not None else None,
    )


class StepModel(Protocol):
    """The model, or a stand-in that makes tokens."""

    def run(self, rows: list[Row]) -> list[Sampled]:
        """One `Sampled` per row with `num_logits`, in order."""

    def close(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class EngineCore:
    """`add` and `abort` requests; call `step` while `has_work`. For one thread; `build.py` makes one."""

    ready: Ready
    blocks: BlockManager
    scheduler: Scheduler
    connector: KvConnector
    model: StepModel
    #: None without guided_decoding_backend.
    guides: Guides | None
    stats: IterationStats
    #: Bytes of KV in one block.
    block_bytes: int
    images: ImageQueue = field(default_factory=ImageQueue)
    #: The clock of all measured times.
    clock: Clock = time.monotonic
    #: Called after model and connector are closed.
    close_last: Callable[[], None] = lambda: None
    #: Outputs for the next report.
    _outbox: list[TokenOutput] = field(default_factory=list, init=False)
    _has_shrunk: bool = field(default=False, init=False)

    # -- commands

    def add(self, request: AddRequest) -> None:
        """Enqueue the request, or answer it with an error output. Never raises."""
        handle = None
        try:
            handle = self.connector.accept(request)
            sequences = [
                Sequence.from_request(request, i, handle, self.clock) for i in range(request.num_choices)
            ]
            for sequence in sequences:
                require_room(sequence, self.blocks)
                sequence.guide = self.guides.start(request.sampling) if self.guides is not None else None
        except Exception as raised:
            if handle is not None:
                self.connector.decline(handle)
            self._fail(request.request_id, _refusal(raised))
            return
        if request.pixels:
            self.images.add(request, sequences)
            return
        for sequence in sequences:
            if not self.connector.awaits_offer(sequence):
                self._enqueue(sequence)

    def abort(self, request_id: int) -> None:
        """End the request at once. Blocks that a read is still filling are freed when the read has ended."""
        found = self.scheduler.find(request_id)
        if not found and (waiting := self.connector.abort(request_id)):
            self._cancelled(waiting)
        for sequence in self.images.abort(request_id):
            self._cancelled(sequence)
        for sequence in [each for each in found if not each.aborted]:
            self._cancelled(sequence)
            if sequence.is_filled:
                sequence.aborted = True
                continue
            self._retire(sequence)

    # -- one step

    @property
    def num_active(self) -> int:
        """Number of waiting and running requests, and of the connector's leases, waits and transfers."""
        waiting = len(self.images) + len(self.scheduler.waiting)
        return waiting + self.scheduler.num_active + self.connector.num_active

    @property
    def has_work(self) -> bool:
        """False when only a new command or a finished transfer can change anything."""
        has_more = bool(self._outbox or self.images) or self.connector.has_news
        return self.scheduler.has_runnable or has_more

    def step(self) -> StepReport:
        """Admit, run one fused forward, and report every token that came out of it."""
        started = self.clock()
        for event in self.connector.poll():
            self._apply(event)
        if self._has_shrunk:
            self._fail_sequences_that_no_longer_fit()
        if self.images:
            self._encode_image()
        for sequence in self.scheduler.admit():
            self.connector.start(sequence)
        rows = self._computable(self.scheduler.schedule())
        if rows:
            self._run(rows)
        handoffs = self.connector.num_leases, self.connector.oldest_lease
        seconds = self.clock() - started
        stats = self.stats.of_step(rows, self.scheduler, self.blocks, handoffs, seconds)
        outputs, self._outbox = self._outbox, []
        return StepReport(outputs, self.num_active, self.blocks.events.take(), stats)

    def seconds_to_deadline(self) -> float | None:
        """Seconds until the next lease or wait expires; None when there is none."""
        return self.connector.seconds_to_deadline()

    def close(self) -> None:
        self.model.close()
        self.connector.close()
        self.close_last()

    # -- internals

    def _apply(self, event: KvEvent) -> None:
        match event:
            case Offered(sequence):
                self._enqueue(sequence)
            case PrefixArrived(sequence):
                sequence.num_computed = sequence.num_fetchable * self.blocks.tokens_per_block
                sequence.num_cached = sequence.num_computed
                self._commit(sequence)
                self.scheduler.received(sequence)
            case KvArrived():
                self._arrived(event)
            case ReadEnded(sequence):
                self._retire(sequence)
            case HandedOff(output, bytes_moved):
                self.stats.pushed(bytes_moved)
                self._outbox.append(output)
            case KvFailed(request_id, error):
                self._retire_request(request_id, error)
            case BlocksReleased(blocks):
                self.blocks.release(blocks)
            case BlocksQuarantined(blocks, peer):
                log.error("%d KV blocks are out of use: a late transfer with %s may land", len(blocks), peer)
                self.blocks.quarantine(blocks)
                self._has_shrunk = True
            case BlocksRestored(blocks):
                self.blocks.restore(blocks)

    def _arrived(self, event: KvArrived) -> None:
        sequence, token = event.sequence, event.token
        self.stats.received(event.bytes_moved, event.num_known * self.block_bytes)
        self.scheduler.received(sequence)
        if token >= (end := self.ready.vocab_size):
            # Prefill sent this token in a notice; a handoff's token was checked with the client's request.
            reason = f"prefill's first token is {token}; expected a token id in [0, {end})"
            self._retire_request(sequence.request_id, KvTransferError(reason))
            return
        sequence.num_computed, sequence.num_cached = sequence.num_prompt, event.num_cached
        self._commit(sequence)
        # Empty if the token came without logprobs, so that later entries stay beside their tokens.
        self._accept(
            sequence, token, (event.logprobs or []) if sequence.sampling.logprobs is not None else None
        )

    def _encode_image(self) -> None:
        request_id = self.images.next_request
        try:
            for sequence in self.images.encode_one():
                self._enqueue(sequence)
        except EngineError as error:
            self._fail(request_id, error)

    def _computable(self, rows: list[Row]) -> list[Row]:
        """Fail requests that lost the KV of an image (preemption without swap space) on the decode engine."""
        if not any(row.lacks_image for row in rows):
            return rows
        for lost in dict.fromkeys(row.sequence.request_id for row in rows if row.lacks_image):
            reason = "the KV of its images was given up, and only the prefill engine has the images"
            self._retire_request(lost, KvTransferError(reason))
        return [row for row in rows if row.sequence.status is Status.RUNNING]

    def _run(self, rows: list[Row]) -> None:
        for row in rows:
            if row.sequence.timer is not None:
                row.sequence.timer.scheduled()
        yielding = [row.sequence for row in rows if row.num_logits]
        try:
            sampled = self.model.run(rows)
        except Exception as error:
            # Out of memory, or a bad kernel: these requests fail, the engine continues.
            log.exception("a step of %d rows failed", len(rows))
            failure = EngineError(f"the forward pass failed: {error}")
            for request_id in dict.fromkeys(row.sequence.request_id for row in rows):
                self._retire_request(request_id, failure)
            return
        for row in rows:
            row.sequence.num_computed += row.num_tokens
            self._commit(row.sequence)
            self.connector.computed(row.sequence)
        for sequence, made in zip(yielding, sampled, strict=True):
            sequence.prompt_logprobs.extend(made.of_prompt)
            # The sequence is no longer running when another choice of its request has just failed.
            if made.token is not None and sequence.status is Status.RUNNING:
                self._accept(sequence, made.token, made.logprobs)

    def _accept(self, sequence: Sequence, token: int, logprobs: LogprobEntry | None) -> None:
        """Append one token, send it unless it is held back, and finish the sequence if the token ends it."""
        sequence.tokens.append(token)
        if sequence.timer is not None:
            sequence.timer.has_token()
        verdict = judge(sequence)
        if sequence.guide is not None and verdict.finish_reason is None:
            try:
                sequence.guide.advance(token)
            except DisaggError as error:
                self._retire_request(sequence.request_id, error)
                return
        sequence.num_unsent += 1
        if logprobs is not None:
            sequence.unsent_logprobs.append(logprobs)
        if verdict.finish_reason is None and sequence.holds_back_tokens:
            return
        output = of_sequence(sequence, verdict)
        if verdict.finish_reason is None:
            self._outbox.append(output)
        elif sequence.is_context_only and (sequence.is_pinned or verdict.finish_reason == "length"):
            self._hand_off(sequence, output)
        else:
            self._retire(sequence)
            self._outbox.append(output)

    def _hand_off(self, sequence: Sequence, output: TokenOutput) -> None:
        """End the sequence but keep its KV for decode. Its output is sent now, or once decode has the KV."""
        self.scheduler.finish(sequence)
        if self.connector.hand_off(sequence, output):
            self._outbox.append(output)

    def _retire(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.blocks.release(self.connector.release(sequence))
        sequence.blocks = []

    def _retire_request(self, request_id: int, error: DisaggError) -> None:
        """Fail the request once. Blocks that a read is still filling are freed when the read has ended."""
        found = self.scheduler.find(request_id)
        living = [s for s in found if not s.aborted]
        for sequence in living:
            if sequence.is_filled:
                sequence.aborted = True
            else:
                self._retire(sequence)
        if living or not found:
            self._fail(request_id, error)

    def _commit(self, sequence: Sequence) -> None:
        """Add newly full blocks to the prefix cache."""
        if sequence.num_computed // self.blocks.tokens_per_block > len(sequence.keys):
            tokens = sequence.tokens[: sequence.num_computed]
            salts = sequence.salt, sequence.cache_salt
            self.blocks.commit(tokens, sequence.blocks, sequence.keys, *salts, sequence.images)

    def _fail_sequences_that_no_longer_fit(self) -> None:
        """The pool may have shrunk: a sequence that no longer fits would block the queue for ever."""
        self._has_shrunk = False
        for sequence in self.scheduler.unfinished():
            if sequence.status is Status.FINISHED:  # with another choice of its request
                continue
            try:
                require_room(sequence, self.blocks)
            except DisaggError as error:
                self._retire_request(sequence.request_id, error)

    def _enqueue(self, sequence: Sequence) -> None:
        try:
            require_room(sequence, self.blocks)
        except DisaggError as error:
            self.blocks.release(self.connector.release(sequence))
            self._fail(sequence.request_id, error)
        else:
            self.scheduler.add(sequence)

    def _cancelled(self, sequence: Sequence) -> None:
        self._outbox.append(of_sequence(sequence, Verdict(finish_reason="cancelled")))

    def _fail(self, request_id: int, error: DisaggError) -> None:
        self._outbox.append(TokenOutput(request_id, error=str(error), error_category=error.category))


def _refusal(raised: Exception) -> DisaggError:
    if isinstance(raised, DisaggError):
        return raised
    # A bug, or no memory: this request fails, the engine continues.
    log.error("a request could not be added", exc_info=raised)
    return EngineError(f"the request could not be added: {raised}")
