"""One log line per request and worker: what was done for it here, why, and when. `trtllm-disagg demo` reads it.

What was done and why is also told in the first and the last chunk of the answer, and counted.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from trtllm_disagg.types import Generate, GenerateRequest, Journey, RequestContext, TokenChunk

# What the engine measured of a request (`--publish-metrics`), told with the answer and on /metrics.


KV_TRANSFER_MS = "kv_transfer_ms"
KV_TRANSFER_BYTES = "kv_transfer_bytes"


def tell_transfer(journey: Journey, result: Any) -> None:
    """How long the request's KV was on its way here, and how much of it came. `result` is a finished RequestOutput."""
    measured = result.outputs[0].request_perf_metrics
    timing = measured.timing_metrics if measured is not None else None
    if timing is None:
        return
    seconds = (timing.kv_cache_transfer_end - timing.kv_cache_transfer_start).total_seconds()
    if seconds > 0:
        journey.facts[KV_TRANSFER_MS] = round(seconds * 1000, 3)
        journey.facts[KV_TRANSFER_BYTES] = timing.kv_cache_size


log = logging.getLogger(__name__)


class JourneyCounts:
    """How many whole requests took which way here: (strategy, reason, last fallback) -> number."""

    LABELS = ("strategy", "reason", "fallback")

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str, str]] = Counter()
        #: KV transfers that the engine measured, their seconds and their bytes.
        self.num_transfers, self.transfer_seconds, self.transfer_bytes = 0, 0.0, 0

    def add(self, journey: Journey) -> None:
        last = journey.fallbacks[-1].partition(":")[0] if journey.fallbacks else "none"
        self.ended[journey.strategy, journey.reason, last] += 1
        if KV_TRANSFER_MS in journey.facts:
            self.num_transfers += 1
            self.transfer_seconds += journey.facts[KV_TRANSFER_MS] / 1000
            self.transfer_bytes += journey.facts[KV_TRANSFER_BYTES]


def journaled(generate: Generate, part: str, counts: JourneyCounts | None = None) -> Generate:
    """`part` names the worker's role and strategy. Times are seconds since the epoch, so that logs of several
    processes on one machine can be put together.
    """
    counts = counts or JourneyCounts()

    async def recorded(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        started = time.time()
        times: list[float] = []
        num_tokens, finish_reason = 0, None
        try:
            async with aclosing(generate(request, context)) as chunks:
                async for chunk in chunks:
                    if len(times) < 2:
                        times.append(time.time())
                    num_tokens += len(chunk.token_ids)
                    finish_reason = chunk.finish_reason or finish_reason
                    # At the end it is complete, but a stop string's end is the frontend's and not ours.
                    if len(times) == 1 or chunk.finish_reason is not None:
                        chunk = _telling(chunk, request.journey)
                    yield chunk
        finally:
            journey = request.journey.told()
            if journey:
                counts.add(request.journey)
            entry = {
                "request": context.id(),
                "part": part,
                "prompt_tokens": len(request.token_ids),
                "tokens": num_tokens,
                "finish_reason": finish_reason,
                "start": started,
                "first_chunk": times[0] if times else None,
                "second_chunk": times[1] if len(times) > 1 else None,
                "end": time.time(),
            }
            log.info("%s%s", PREFIX, json.dumps(entry | ({"disagg": journey} if journey else {})))

    return recorded


def _telling(chunk: TokenChunk, journey: Journey) -> TokenChunk:
    """Where Dynamo lets a worker add to the answer: `nvext.extra_fields: ["engine_data"]`."""
    told: dict[str, Any] = journey.told()
    if not told:
        return chunk
    theirs = (chunk.engine_data or {}).get(ENGINE_DATA, {})
    return msgspec.structs.replace(
        chunk, engine_data=(chunk.engine_data or {}) | {ENGINE_DATA: theirs | told}
    )


#: The key of `engine_data` under which the journey is.
ENGINE_DATA = "disagg"

#: Starts every journal line's message.
PREFIX = "journal "
