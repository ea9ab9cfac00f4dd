"""The engine core: requests in, steps, token outputs out. `core_process.py` has the sockets and the process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.embedded.connector.connector import (
    BlocksQuarantined,
    BlocksReleased,
    BlocksRestored,
    HandedOff,
    KvArrived,
    KvEvent,
    KvFailed,
    Offered,
    PrefixArrived,
    ReadEnded,
)
from trtllm_disagg.embedded.connector.create import create_connector
from trtllm_disagg.embedded.core.outputs import Outbox, of_token
from trtllm_disagg.embedded.core.precompile import warm_up
from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.embedded.ipc.messages import (
    AddRequest,
    LogprobEntry,
    Ready,
    SamplingSpec,
    StepReport,
    TokenOutput,
)
from trtllm_disagg.embedded.kv_cache.block_manager import KvEventLog
from trtllm_disagg.embedded.kv_cache.memory import KvPool, LocalKvMemory
from trtllm_disagg.embedded.model.attention import TILE
from trtllm_disagg.embedded.model.forward import ModelRunner
from trtllm_disagg.embedded.model.forward_plan import choose_forward
from trtllm_disagg.embedded.model.model_loader import ModelShape, load_model, read_shape
from trtllm_disagg.embedded.model.sampler import sample
from trtllm_disagg.embedded.model.sizing import (
    choose_device,
    kv_layout,
    max_seq_len,
    new_pool,
    num_kv_blocks,
)
from trtllm_disagg.embedded.params.llm_args import LlmArgs
from trtllm_disagg.embedded.scheduler.capacity import require_room
from trtllm_disagg.embedded.scheduler.scheduler import Row, create_blocks, create_scheduler
from trtllm_disagg.embedded.scheduler.sequence import Sequence, Status, judge
from trtllm_disagg.embedded.scheduler.statistics import IterationStats
from trtllm_disagg.embedded.tensor_parallel.team import SingleRank, Team
from trtllm_disagg.errors import DisaggError, EngineError, InvalidRequestError
from trtllm_disagg.kv_transfer.base import KvTimeouts, StagingTransport
from trtllm_disagg.processes.activity import LOADING, NullReporter, Reporter

if TYPE_CHECKING:
    from trtllm_disagg.embedded.guided_decoding.guides import Guides

log = logging.getLogger(__name__)


class EngineCore:
    """`add` and `abort` requests, call `step` while `has_work`. Used by one thread."""

    def __init__(
        self,
        args: LlmArgs,
        wake: Callable[[], None],
        team: SingleRank | Team | None = None,
        reporter: Reporter | None = None,
        *,
        transport: StagingTransport | None = None,
        timeouts: KvTimeouts | None = None,
    ) -> None:
        """`wake` is called from other threads when a transfer ended and `step` has something to do.

        `transport` and `timeouts`: for KV transfer, instead of those of `args`.
        """
        reporter = reporter or NullReporter()
        self._team = team = team or SingleRank()
        device = choose_device(args.embedded.device, team.size)
        self.shape = read_shape(Path(args.model), args.dtype)
        plan = choose_forward(Path(args.model), args.embedded, self.shape, device, this_cpu())
        for remark in plan.remarks:
            log.info("%s", remark)
        kv_config = args.kv_cache_config
        size = kv_config.tokens_per_block
        self.max_seq_len = max_seq_len(args, self.shape)
        num_blocks = num_kv_blocks(args, self.shape, device)
        self._events = KvEventLog(kv_config.event_buffer_max_size, self.max_seq_len)
        self.blocks = create_blocks(kv_config, num_blocks, self._events)
        self._max_prompt = self.max_seq_len if args.enable_chunked_prefill else args.max_num_tokens
        team.start(plan.told_to_all(args), num_blocks)
        reporter.tell(LOADING)
        model = load_model(Path(args.model), self.shape, plan.kind)
        team.shard(model)
        wanted = new_pool(self.shape, num_blocks, size, device, team.size)
        layout = kv_layout(self.shape, size)
        self.connector, kv = create_connector(
            args, layout, wanted, wake, team.peers, transport=transport, timeouts=timeouts
        )
        self.scheduler = create_scheduler(args, self.blocks, team.memory(LocalKvMemory(kv)), TILE)
        pool = KvPool(kv)
        with plan.ops.compiling_told(reporter):
            forward = plan.make_forward(model, pool, self.max_seq_len, reporter)
            self._runner = team.broadcasting(ModelRunner(forward, pool, plan.ops))
            reporter.tell("warming up")
            warm_up(self._runner, Path(args.model), num_blocks, size)
        self._is_exact = plan.is_exact
        self._guides = create_guides(args, self.shape)
        self._stats = IterationStats(args)
        self._block_bytes = kv.nbytes // num_blocks
        self._outbox = Outbox()
        self._has_shrunk = False
        self._num_steps = 0

    def ready(self) -> Ready:
        return Ready(
            num_blocks=self.blocks.num_blocks,
            tokens_per_block=self.blocks.tokens_per_block,
            vocab_size=self.shape.config.vocab_size,
            max_seq_len=self.max_seq_len,
            transport=self.connector.description,
            end_ids=self.shape.end_ids,
            endpoint=self.connector.endpoint,
            pids=self._team.pids,
            is_exact=self._is_exact,
        )

    # -- commands

    def add(self, request: AddRequest) -> None:
        """A request that cannot run is answered with an error output; it never raises."""
        try:
            handle = self.connector.accept(request)
            sequences = [Sequence.from_request(request, i, handle) for i in range(request.num_choices)]
            for sequence in sequences:
                self._require_fits(sequence)
                sequence.guide = self._guides.start(request.sampling)
        except DisaggError as error:
            self._fail(request.request_id, error)
            return
        for sequence in sequences:
            if not self.connector.awaits_offer(sequence):
                self._enqueue(sequence)

    def abort(self, request_id: int) -> None:
        """End the request at once. Blocks that a read is still filling are freed when the read has ended."""
        found = self.scheduler.find(request_id)
        if not found and (waiting := self.connector.abort(request_id)):
            self._outbox.put_cancel(waiting)
        for sequence in [each for each in found if not each.aborted]:
            self._outbox.put_cancel(sequence)
            if sequence.is_filled:
                sequence.aborted = True
                continue
            if sequence.status is Status.WAITING and sequence.handle is not None:
                self.connector.decline(sequence.handle)
            self._retire(sequence)

    # -- one step

    @property
    def num_active(self) -> int:
        """Requests that wait or run, and what the connector holds on to."""
        return len(self.scheduler.waiting) + self.scheduler.num_active + self.connector.num_active

    @property
    def has_work(self) -> bool:
        """False when only a new command or a finished transfer can change anything."""
        return self.scheduler.has_runnable or bool(self._outbox) or self.connector.has_news

    def step(self) -> StepReport:
        """Admit, run one fused forward, and report every token that came out of it."""
        started = time.perf_counter()
        for event in self.connector.poll():
            self._apply(event)
        if self._has_shrunk:
            self._refuse_what_never_fits()
        for sequence in self.scheduler.admit():
            self.connector.start(sequence)
        rows = self.scheduler.schedule()
        if rows:
            self._run(rows)
        stats = self._stats.of_step(
            rows, self.scheduler, self.blocks, self.connector.num_leases, time.perf_counter() - started
        )
        return StepReport(self._outbox.take(), self.num_active, self._events.take(), stats)

    def seconds_to_deadline(self) -> float | None:
        """Until a lease or a wait ends by itself; None when there is none."""
        return self.connector.seconds_to_deadline()

    def check(self) -> None:
        """Invariants; when idle, no block is used but by leases."""
        self.blocks.check()

    def close(self) -> None:
        self._runner.close()
        self.connector.close()
        self._team.close()

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
            case KvArrived(sequence, token, logprobs):
                self._stats.received(event.bytes_moved, event.num_known * self._block_bytes)
                sequence.num_computed, sequence.num_cached = sequence.num_prompt, event.num_cached
                self._commit(sequence)
                self.scheduler.received(sequence)
                self._accept(sequence, token, logprobs if sequence.sampling.logprobs is not None else None)
            case ReadEnded(sequence):
                self._retire(sequence)
            case HandedOff(output, bytes_moved):
                self._stats.pushed(bytes_moved)
                self._outbox.put(output)
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

    def _run(self, rows: list[Row]) -> None:
        self._num_steps += 1
        for row in rows:
            row.sequence.timer.scheduled(self._num_steps)
        sampling = [row.sequence for row in rows if row.samples]
        try:
            logits = self._runner.run(rows)
            sampled = sample(logits, sampling) if sampling else []
        except Exception as error:
            # Out of memory, a bad kernel: these requests fail, the engine goes on.
            log.exception("a step of %d rows failed", len(rows))
            failure = EngineError(f"the forward pass failed: {error}")
            for request_id in dict.fromkeys(row.sequence.request_id for row in rows):
                self._retire_request(request_id, failure)
            return
        for row in rows:
            row.sequence.num_computed += row.num_tokens
            self._commit(row.sequence)
            self.connector.computed(row.sequence)
        for sequence, choice in zip(sampling, sampled, strict=True):
            if sequence.status is Status.RUNNING:  # else another choice of its request has just failed
                self._accept(sequence, choice.token, choice.logprobs)

    def _accept(self, sequence: Sequence, token: int, logprobs: LogprobEntry | None) -> None:
        """Append one token, tell the client, and finish the sequence if that token ends it."""
        sequence.tokens.append(token)
        sequence.timer.has_token(self._num_steps)
        verdict = judge(sequence)
        if sequence.guide is not None and verdict.finish_reason is None:
            try:
                sequence.guide.advance(token)
            except DisaggError as error:
                self._retire_request(sequence.request_id, error)
                return
        output = of_token(sequence, token, logprobs, verdict)
        if verdict.finish_reason is None or self._is_told_its_end(sequence, output):
            self._outbox.put_token(sequence, output)

    def _is_told_its_end(self, sequence: Sequence, output: TokenOutput) -> bool:
        """End the sequence. False when the client hears of it once decode has its KV."""
        if sequence.is_context_only and (sequence.is_pinned or output.finish_reason == "length"):
            self.scheduler.finish(sequence)
            return self.connector.hand_off(sequence, output)
        self._retire(sequence)
        return True

    def _retire(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.blocks.release(self.connector.release(sequence))
        sequence.blocks = []

    def _retire_request(self, request_id: int, error: DisaggError) -> None:
        """Once; what a read is still filling is freed when the read has ended."""
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
        """Make every block that is full now known to the prefix cache."""
        if sequence.num_computed // self.blocks.tokens_per_block > len(sequence.keys):
            tokens = sequence.tokens[: sequence.num_computed]
            self.blocks.commit(tokens, sequence.blocks, sequence.keys, sequence.salt, sequence.cache_salt)

    def _refuse_what_never_fits(self) -> None:
        """The pool is smaller now; a sequence that does not fit any more would wait, and let wait, for ever."""
        self._has_shrunk = False
        for sequence in self.scheduler.unfinished():
            try:
                self._require_fits(sequence)
            except DisaggError as error:
                self._retire_request(sequence.request_id, error)

    def _enqueue(self, sequence: Sequence) -> None:
        try:
            self._require_fits(sequence)
        except DisaggError as error:
            self.blocks.release(self.connector.release(sequence))
            self._fail(sequence.request_id, error)
        else:
            self.scheduler.add(sequence)

    def _fail(self, request_id: int, error: DisaggError) -> None:
        self._outbox.put_error(request_id, error)

    def _require_fits(self, sequence: Sequence) -> None:
        usable = self.blocks.num_blocks - self.blocks.num_quarantined
        require_room(sequence, self._max_prompt, usable, self.blocks.tokens_per_block)


class NoGuides:
    """guided_decoding_backend is not set."""

    def start(self, sampling: SamplingSpec) -> None:
        if sampling.grammar is not None:
            raise InvalidRequestError("guided decoding needs guided_decoding_backend, which is not set")


def create_guides(args: LlmArgs, shape: ModelShape) -> Guides | NoGuides:
    """What guiding needs is imported only where an engine guides."""
    if args.guided_decoding_backend is None:
        return NoGuides()
    from trtllm_disagg.embedded.guided_decoding.guides import Guides
    from trtllm_disagg.embedded.guided_decoding.matchers import read_guide_tokenizer

    tokenizer = read_guide_tokenizer(Path(args.tokenizer or args.model))
    return Guides(tokenizer, shape.config.vocab_size, shape.end_ids)
