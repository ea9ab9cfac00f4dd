"""Per-iteration statistics in TensorRT-LLM's format."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple

import psutil

from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.scheduler.scheduler import Counts, Row, Scheduler
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence, Status

log = logging.getLogger(__name__)

_MEMORY_SECONDS = 0.1
_OF_KV = ("kvPulls", "kvBytesPulled", "kvBytesSaved", "kvPushes", "kvBytesPushed")
_TOTALS = ("prefillTokens", "decodeTokens", *_OF_KV)
_NOTHING_NEW = {
    "newActiveRequestsQueueLatencyMS": 0.0,
    "numNewActiveRequests": 0,
    "numCompletedRequests": 0,
}


def request_stats(rows: Seq[Row], scheduler: Scheduler) -> list[dict[str, Any]]:
    """`requestStats` after a step of these rows, one per choice: first those of the rows, which may have ended in it,
    then all others.
    """
    ran = dict.fromkeys(row.sequence for row in rows)
    others = [sequence for sequence in scheduler.unfinished() if sequence not in ran]
    return [_of(sequence, True) for sequence in ran] + [_of(sequence, False) for sequence in others]


def _of(sequence: Sequence, scheduled: bool) -> dict[str, Any]:
    admission = sequence.admission
    prompt_blocks = admission.reused + admission.missed
    return {
        "id": sequence.request_id,
        "stage": _stage(sequence),
        "contextPrefillPosition": min(sequence.num_computed, sequence.num_prompt),
        "numGeneratedTokens": sequence.num_output,
        "avgNumDecodedTokensPerIter": 1.0 if sequence.num_output else 0.0,
        "scheduled": scheduled,
        "paused": sequence.status is Status.PAUSED,
        "disServingStats": _transfer(sequence),
        "allocTotalBlocksPerRequest": admission.allocated,
        "allocNewBlocksPerRequest": admission.allocated,
        "reusedBlocksPerRequest": admission.reused,
        "missedBlocksPerRequest": admission.missed,
        "kvCacheHitRatePerRequest": admission.reused / prompt_blocks if prompt_blocks else 0.0,
    }


def _stage(sequence: Sequence) -> str:
    if sequence.status is Status.FINISHED:
        return "GENERATION_COMPLETE"
    if sequence.status is Status.WAITING:
        return "QUEUED"
    return "CONTEXT_IN_PROGRESS" if sequence.in_prefill else "GENERATION_IN_PROGRESS"


def _transfer(sequence: Sequence) -> dict[str, Any] | None:
    """The KV transfer to this engine, for a request that is measured (`return_perf_metrics`)."""
    measured = sequence.measured
    if measured is None or not measured.transfer_end:
        return None
    seconds = measured.transfer_end - measured.transfer_start
    return {"kvCacheTransferMS": seconds * 1000, "kvCacheSize": measured.transfer_bytes}


class Batch(NamedTuple):
    """The rows of a step, counted: prefill chunks are context, the others generation."""

    rows: Seq[Row]
    num_context: int
    num_context_tokens: int

    @classmethod
    def of(cls, rows: Seq[Row]) -> Batch:
        context = [row.num_tokens for row in rows if row.in_prefill]
        return cls(rows, len(context), sum(context))

    @property
    def num_generation(self) -> int:
        return len(self.rows) - self.num_context

    @property
    def num_generated(self) -> int:
        """A paused answer that is computed again has rows that give no token."""
        return sum(row.samples and not row.in_prefill for row in self.rows)


class ResidentMemory:
    """Bytes of this process, not older than a moment: to ask the system is the dearest part of a record."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._bytes, self._asked = 0, float("-inf")

    def __call__(self) -> int:
        now = time.monotonic()
        if now - self._asked >= _MEMORY_SECONDS:
            self._bytes, self._asked = self._process.memory_info().rss, now
        return self._bytes


class IterationStats:
    def __init__(self, args: LlmArgs, gpu_bytes: Callable[[], int] = lambda: 0) -> None:
        """`gpu_bytes`: GPU memory that is taken."""
        self._gpu_bytes = gpu_bytes
        self._enabled = args.enable_iter_perf_stats
        self._tells_requests = args.enable_iter_req_stats
        self._prints = args.print_iter_log
        self._max_batch_size = args.max_batch_size
        #: Nothing tunes them while the engine runs.
        self._sizes = {
            f"max{name}{kind}": size
            for name, size in (("BatchSize", args.max_batch_size), ("NumTokens", args.max_num_tokens))
            for kind in ("Static", "TunerRecommended", "Runtime")
        }
        self._cpu_bytes = ResidentMemory()
        self._counts = Counts()
        self._iteration = 0
        #: Since the start.
        self._totals = Counter(dict.fromkeys(_TOTALS, 0))
        self._held: tuple[object, ...] = ()

    def received(self, bytes_moved: int, bytes_saved: int) -> None:
        """A prompt's KV has come from another engine; saved are the blocks that were here already."""
        self._totals.update(kvPulls=1, kvBytesPulled=bytes_moved, kvBytesSaved=bytes_saved)

    def pushed(self, bytes_moved: int) -> None:
        """A prompt's KV was written to another engine."""
        self._totals.update(kvPushes=1, kvBytesPushed=bytes_moved)

    def of_step(
        self,
        rows: Seq[Row],
        scheduler: Scheduler,
        blocks: BlockManager,
        handoffs: tuple[int, float | None],
        seconds: float,
    ) -> list[dict[str, Any]]:
        """One dict for a step that ran, or that changed what is held; none when statistics are off. `handoffs`: how
        many are held, and when the oldest one was made.
        """
        paused, waiting = len(scheduler.paused), len(scheduler.waiting)
        held = (scheduler.num_active, paused, waiting, blocks.num_used, handoffs)
        if not (self._enabled or self._prints) or (not rows and held == self._held):
            return []
        self._held = held
        self._iteration += 1
        batch = Batch.of(rows)
        if self._prints:
            self._print(batch, scheduler, blocks, seconds)
        if not self._enabled:
            return []
        self._totals.update(prefillTokens=batch.num_context_tokens, decodeTokens=batch.num_generated)
        counts, before = replace(scheduler.counts), self._counts
        self._counts = counts
        stats = {
            "timestamp": time.strftime("%m-%d-%Y %H:%M:%S"),
            "iter": self._iteration,
            "iterLatencyMS": seconds * 1000,
            "newActiveRequestsQueueLatencyMS": (counts.queued_seconds - before.queued_seconds) * 1000,
            "numNewActiveRequests": counts.admitted - before.admitted,
            "numActiveRequests": scheduler.num_active,
            "numQueuedRequests": len(scheduler.waiting),
            "numCompletedRequests": counts.finished - before.finished,
            "maxNumActiveRequests": self._max_batch_size,
            **self._sizes,
            "gpuMemUsage": self._gpu_bytes(),
            "cpuMemUsage": self._cpu_bytes(),
            "pinnedMemUsage": 0,
            "kvCacheStats": _kv_cache(blocks),
            "inflightBatchingStats": _batching(batch, scheduler),
            # Ours: finished prefills with KV that waits for a decode, and running totals.
            "numHandoffsHeld": handoffs[0],
            "oldestHandoffAt": handoffs[1],
            "totals": dict(self._totals),
        }
        return [stats | {"requestStats": request_stats(rows, scheduler)} if self._tells_requests else stats]

    @property
    def tells_each_step(self) -> bool:
        """More than numbers of the whole engine."""
        return self._prints or self._tells_requests

    def of_decode_steps(
        self,
        rows: Seq[Row],
        scheduler: Scheduler,
        blocks: BlockManager,
        handoffs: tuple[int, float | None],
        seconds: Seq[float],
    ) -> list[dict[str, Any]]:
        """One dict for each of several steps that ran only these rows, made after the last of them. `seconds` of each
        step. Not for use where `tells_each_step`.
        """
        records = self.of_step(rows, scheduler, blocks, handoffs, seconds[0])
        for first, each in itertools.product(records[:1], seconds[1:]):
            self._iteration += 1
            self._totals.update(decodeTokens=len(rows))
            told = {"iter": self._iteration, "iterLatencyMS": each * 1000, "totals": dict(self._totals)}
            records.append(first | _NOTHING_NEW | told)
        return records

    def _print(self, batch: Batch, scheduler: Scheduler, blocks: BlockManager, seconds: float) -> None:
        log.info(
            "iter = %d, num_scheduled_requests: %d, states = {num_ctx_requests: %d, num_ctx_tokens: %d, "
            "num_generation_tokens: %d}, active: %d, queued: %d, used KV blocks: %d of %d, step: %.2f ms",
            *(self._iteration, len(batch.rows), batch.num_context),
            *(batch.num_context_tokens, batch.num_generation, scheduler.num_active, len(scheduler.waiting)),
            *(blocks.num_used, blocks.num_blocks, seconds * 1000),
        )


def _kv_cache(blocks: BlockManager) -> dict[str, Any]:
    reused, missed = blocks.reused_blocks, blocks.missed_blocks
    return {
        "maxNumBlocks": blocks.num_blocks,
        "freeNumBlocks": blocks.num_available,
        "usedNumBlocks": blocks.num_used,
        "tokensPerBlock": blocks.tokens_per_block,
        "allocTotalBlocks": blocks.allocated_blocks,
        "allocNewBlocks": blocks.allocated_blocks,
        "reusedBlocks": reused,
        "missedBlocks": missed,
        "cacheHitRate": reused / (reused + missed) if reused + missed else 0.0,
    }


def _batching(batch: Batch, scheduler: Scheduler) -> dict[str, Any]:
    queued_prompts = [s.num_prompt for s in scheduler.waiting if not s.is_generation_only]
    queued_handoffs = [s.num_prompt for s in scheduler.waiting if s.is_generation_only]
    return {
        "numScheduledRequests": len(batch.rows),
        "numContextRequests": batch.num_context,
        "numGenRequests": batch.num_generation,
        "numPausedRequests": len(scheduler.paused),
        "numCtxTokens": batch.num_context_tokens,
        "microBatchId": 0,
        "avgNumDecodedTokensPerIter": 1.0,
        "numCtxKvTokens": sum(row.sequence.num_computed for row in batch.rows if row.in_prefill),
        "numGenKvTokens": sum(row.sequence.num_computed for row in batch.rows if not row.in_prefill),
        "numQueuedContextRequests": len(queued_prompts),
        "numQueuedCtxTokens": sum(queued_prompts),
        "numQueuedGenRequests": len(queued_handoffs),
        "numQueuedGenKvTokens": sum(queued_handoffs),
        "numPausedKvTokens": sum(len(s.tokens) for s in scheduler.paused),
    }
