"""Per-iteration statistics in TensorRT-LLM's format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.scheduler.scheduler import Counts, Row, Scheduler

_OF_KV = ("kvPulls", "kvBytesPulled", "kvBytesSaved", "kvPushes", "kvBytesPushed")
_TOTALS = ("prefillTokens", "decodeTokens", *_OF_KV)


class IterationStats:
    def __init__(self, args: LlmArgs) -> None:
        self._enabled = args.enable_iter_perf_stats
        self._max_batch_size = args.max_batch_size
        self._max_num_tokens = args.max_num_tokens
        self._counts = Counts()
        self._iteration = 0
        #: Since the start.
        self._totals = Counter(dict.fromkeys(_TOTALS, 0))
        self._held: tuple[object, ...] = ()

    def received(self, bytes_moved: int, bytes_saved: int) -> None:
        """A prompt's KV came from a peer; `bytes_saved` were in the cache."""
        self._totals.update(kvPulls=1, kvBytesPulled=bytes_moved, kvBytesSaved=bytes_saved)

    def pushed(self, bytes_moved: int) -> None:
        """A prompt's KV was written to a peer."""
        self._totals.update(kvPushes=1, kvBytesPushed=bytes_moved)

    def of_step(
        self,
        rows: Seq[Row],
        scheduler: Scheduler,
        blocks: BlockManager,
        handoffs: tuple[int, float | None],
        seconds: float,
    ) -> list[dict[str, Any]]:
        """One dict for a step that ran or changed the held blocks; none if statistics are off. `handoffs`: number held,
        and when the oldest was made.
        """
        paused, waiting = len(scheduler.paused), len(scheduler.waiting)
        held = (scheduler.num_active, paused, waiting, blocks.num_used, handoffs)
        if not self._enabled or (not rows and held == self._held):
            return []
        self._held = held
        self._iteration += 1
        # Prefill chunks are context, other rows generation.
        context = [row for row in rows if row.in_prefill]
        generation = [row for row in rows if not row.in_prefill]
        self._totals["prefillTokens"] += sum(row.num_tokens for row in context)
        # A recomputed paused answer has rows without a token.
        self._totals["decodeTokens"] += sum(row.samples for row in generation)
        counts, before = replace(scheduler.counts), self._counts
        self._counts = counts
        stats = {
            "timestamp": time.strftime("%m-%d-%Y %H:%M:%S"),
            "iter": self._iteration,
            "iterLatencyMS": seconds * 1000,
            "numNewActiveRequests": counts.admitted - before.admitted,
            "numActiveRequests": scheduler.num_active,
            "numQueuedRequests": len(scheduler.waiting),
            "numCompletedRequests": counts.finished - before.finished,
            "maxNumActiveRequests": self._max_batch_size,
            "maxBatchSizeStatic": self._max_batch_size,
            "maxNumTokensStatic": self._max_num_tokens,
            "kvCacheStats": _kv_cache(blocks),
            "inflightBatchingStats": _batching(context, generation, scheduler),
            # Our own fields: finished prefills that wait for decode, and running totals.
            "numHandoffsHeld": handoffs[0],
            "oldestHandoffAt": handoffs[1],
            "totals": dict(self._totals),
        }
        return [stats]


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


def _batching(context: Seq[Row], generation: Seq[Row], scheduler: Scheduler) -> dict[str, Any]:
    queued_prompts = [s.num_prompt for s in scheduler.waiting if not s.is_generation_only]
    queued_handoffs = [s.num_prompt for s in scheduler.waiting if s.is_generation_only]
    return {
        "numScheduledRequests": len(context) + len(generation),
        "numContextRequests": len(context),
        "numGenRequests": len(generation),
        "numPausedRequests": len(scheduler.paused),
        "numCtxTokens": sum(row.num_tokens for row in context),
        "microBatchId": 0,
        "avgNumDecodedTokensPerIter": 1.0,
        "numCtxKvTokens": sum(row.sequence.num_computed for row in context),
        "numGenKvTokens": sum(row.sequence.num_computed for row in generation),
        "numQueuedContextRequests": len(queued_prompts),
        "numQueuedCtxTokens": sum(queued_prompts),
        "numQueuedGenRequests": len(queued_handoffs),
        "numQueuedGenKvTokens": sum(queued_handoffs),
        "numPausedKvTokens": sum(len(s.tokens) for s in scheduler.paused),
    }
