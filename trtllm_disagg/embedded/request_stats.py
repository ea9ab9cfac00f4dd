"""Statistics of each request in each step, in TensorRT-LLM's format (`requestStats`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from trtllm_disagg.embedded.scheduler import Row, Scheduler
from trtllm_disagg.embedded.sequence import Sequence, Status


def request_stats(rows: Seq[Row], scheduler: Scheduler) -> list[dict[str, Any]]:
    """After a step of these rows: of those first, which may have ended in it, then of all others. One a choice."""
    ran = [row.sequence for row in rows]
    others = [sequence for sequence in scheduler.everyone() if sequence not in set(ran)]
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
    """Of KV that came here, for a request that is measured (`return_perf_metrics`)."""
    measured = sequence.measured
    if measured is None or not measured.transfer_end:
        return None
    seconds = measured.transfer_end - measured.transfer_start
    return {"kvCacheTransferMS": seconds * 1000, "kvCacheSize": measured.transfer_bytes}
