"""How full workers are: the share of KV blocks in use, on this worker and on those of the other role; and how many
requests this worker runs alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

from trtllm_disagg.config.deciders import Occupancy
from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.errors import DisaggError, OverloadedError
from trtllm_disagg.handlers.cancellation import in_background
from trtllm_disagg.handlers.remote import StageInstance
from trtllm_disagg.handlers.select import Directory
from trtllm_disagg.handlers.streams import CountedStream
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

log = logging.getLogger(__name__)

#: Key in a worker's description.
KV_OCCUPANCY = "kv_occupancy"

#: While requests come, each instance is asked this often; its answer counts for so long.
_REFRESH_SECONDS, _VALID_SECONDS = 0.25, 2.0
_ANSWER_SECONDS = 1.0


class OwnOccupancy:
    """This worker's occupancy, from its engine's statistics: the mean over ranks of attention DP. It is 0 before the
    engine's first step, when there are no statistics.
    """

    def __init__(self) -> None:
        self._ranks: dict[Any, float] = {}

    def update(self, stat: Mapping[str, Any]) -> None:
        """`stat`: one record of `get_stats_async`."""
        blocks = stat.get("kvCacheStats") or {}
        used, most = blocks.get("usedNumBlocks"), blocks.get("maxNumBlocks")
        if used is not None and most:
            self._ranks[stat.get("attentionDpRank")] = used / most

    def clear(self) -> None:
        """The engine is idle."""
        self._ranks.clear()

    @property
    def share(self) -> float:
        ranks = list(self._ranks.values())  # copied: the thread that reads statistics may add a rank
        return sum(ranks) / len(ranks) if ranks else 0.0


class Occupancies:
    """The occupancy of the other role's workers; always unknown for a worker that does not ask them."""

    def now(self) -> Occupancy | None:
        """None when it is not known. Never waits."""
        return None


class StageOccupancy(Occupancies):
    """The mean occupancy of the other role's workers that have answered lately.

    `now` starts to ask them in the background, so that a decision never waits. The first decision after a pause finds
    it unknown.
    """

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        #: By instance: (its share, when it answered).
        self._shares: dict[int, tuple[float, float]] = {}
        self._asked_at = -_REFRESH_SECONDS
        self._is_asking = False

    def now(self) -> Occupancy | None:
        now = self._clock()
        if not self._is_asking and now - self._asked_at >= _REFRESH_SECONDS:
            self._is_asking, self._asked_at = True, now
            in_background(self._ask_all(), "question for the occupancy of other workers")
        there = set(self._directory.instance_ids())
        known = [
            (share, now - at)
            for instance_id, (share, at) in self._shares.items()
            if instance_id in there and now - at <= _VALID_SECONDS
        ]
        if not known:
            return None
        return Occupancy(sum(share for share, _ in known) / len(known), max(age for _, age in known))

    async def _ask_all(self) -> None:
        try:
            there = self._directory.instance_ids()
            self._shares = {each: share for each, share in self._shares.items() if each in there}
            await asyncio.gather(*(self._ask(self._directory.instance(each)) for each in there))
        finally:
            self._is_asking = False

    async def _ask(self, instance: StageInstance) -> None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                description: object = await instance.describe()
        except (DisaggError, TimeoutError) as error:
            # Its last answer expires soon, and the next request that is sent to it fails with the reason.
            log.debug("instance %x did not report its occupancy: %s", instance.instance_id, error)
            return
        share = description.get(KV_OCCUPANCY) if isinstance(description, dict) else None
        if isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1:
            self._shares[instance.instance_id] = float(share), self._clock()


class RunningRequests:
    """Counts the requests that this worker runs in one way now, and their tokens: the prompts and the most that may be
    generated.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0

    def counting(self, generate: Generate) -> Generate:
        def counted(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
            return CountedStream(
                partial(self._enter, most_tokens(request)), partial(generate, request, context)
            )

        return counted

    def _enter(self, tokens: int) -> Callable[[], None]:
        self._add(1, tokens)
        return partial(self._add, -1, -tokens)

    def _add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens


def most_tokens(request: GenerateRequest) -> int:
    """The tokens of the prompt and `max_tokens`, which frontends fill in; without it only the prompt counts."""
    return len(request.token_ids) + (request.stop.max_tokens or 0)


def within_fallback_budget(local: Generate, thresholds: Live[Thresholds]) -> Generate:
    """`local`, limited to what this worker can run besides its own work: when all workers of one role are lost, their
    work must not overload those of the other role. Raises OverloadedError beyond `--max-local-fallbacks` and
    `--max-local-fallback-tokens`; when no other one runs, a request may be of any length.
    """
    running = RunningRequests()
    counted = running.counting(local)

    def bounded(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        limits = thresholds.value
        now = f"{running.requests} requests of up to {running.tokens} tokens"
        if 0 < limits["max_local_fallbacks"] <= running.requests:
            raise _overloaded(f"{now} (--max-local-fallbacks {limits['max_local_fallbacks']})")
        most = limits["max_local_fallback_tokens"]
        if running.requests and 0 < most < running.tokens + most_tokens(request):
            raise _overloaded(f"{now} (--max-local-fallback-tokens {most})")
        return counted(request, context)

    return bounded


def _overloaded(running: str) -> OverloadedError:
    return OverloadedError(
        f"overloaded: the other stage fails, and this worker serves {running} alone already; try again later"
    )
