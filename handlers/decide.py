"""Conditional disaggregation: decides whether another worker takes part in a request or this worker answers it alone.

`trtllm_disagg.config.deciders` has the rules. Here are the facts that they get: what is cached, queued and in use.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_disagg.config.deciders import ALWAYS, BY_OCCUPANCY, DECIDERS, Decision, Facts, Occupancy
from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import DisaggError
from trtllm_disagg.handlers.admission import RequestCount, most_tokens
from trtllm_disagg.handlers.cancellation import in_background
from trtllm_disagg.handlers.select import Directory, StageInstance
from trtllm_disagg.types import GenerateRequest

log = logging.getLogger(__name__)

#: Identifies a block: (hash of the block before it, its tokens as bytes); the first block has the cache salt as hash.
_Key = tuple[int | str, bytes]


def packed_blocks(tokens: Sequence[int], size: int) -> Iterator[bytes]:
    """The whole blocks of `size` tokens, 8 bytes each."""
    packed, width = array("q", tokens).tobytes(), size * 8
    return (packed[at : at + width] for at in range(0, len(packed) - width + 1, width))


class CachedPrefix:
    """The blocks in a prefix cache, kept up to date by KV events. A lookup takes O(blocks of the prompt)."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._hashes: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def num_cached(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Cached tokens at the start of a prompt. Its last token never counts: it is computed for its logits."""
        count = 0
        before: int | str = salt or ""
        for block in packed_blocks(tokens, self._size):
            found = self._hashes.get((before, block))
            if found is None:
                break
            before, count = found, count + self._size
        return min(count, len(tokens) - 1)

    # -- called by `dynamo_runtime.kv_events`

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None:
        before: int | str = parent_hash if parent_hash is not None else cache_salt or ""
        for block, block_hash in zip(packed_blocks(token_ids, self._size), block_hashes, strict=True):
            self._forget(block_hash)
            self._hashes[before, block] = block_hash
            self._keys[block_hash] = before, block
            before = block_hash

    def publish_removed(self, block_hashes: list[int]) -> None:
        for block_hash in block_hashes:
            self._forget(block_hash)

    def clear(self) -> None:
        """Events were lost: every block counts as not cached until it is stored again."""
        self._hashes.clear()
        self._keys.clear()

    def _forget(self, block_hash: int) -> None:
        key = self._keys.pop(block_hash, None)
        if key is not None and self._hashes.get(key) == block_hash:
            del self._hashes[key]


class CachedPrefixes:
    """A `CachedPrefix` for each rank of attention DP: a block that one rank drops may stay on others."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ranks = [CachedPrefix(block_size)]

    def of_rank(self, rank: int) -> CachedPrefix:
        while len(self._ranks) <= rank:
            self._ranks.append(CachedPrefix(self._block_size))
        return self._ranks[rank]

    def num_cached(self, tokens: Sequence[int], salt: str | None = None, rank: int | None = None) -> int:
        """Cached tokens on the rank of the request; while the engine has not chosen one, on the best rank."""
        chosen = self._ranks if rank is None or rank >= len(self._ranks) else [self._ranks[rank]]
        return max(each.num_cached(tokens, salt) for each in chosen)


#: Key in a worker's description.
KV_OCCUPANCY = "kv_occupancy"

#: While requests come, each instance is asked this often; its answer counts for so long.
_REFRESH_SECONDS, _VALID_SECONDS = 0.25, 2.0
_ANSWER_SECONDS = 1.0
#: Of more instances a sample is asked: a mean needs no more, and each of a thousand workers asks.
_MOST_ASKED = 32


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


#: The occupancy of the other role's workers; None when it is not known. Never waits.
OtherOccupancy = Callable[[], Occupancy | None]


class StageOccupancy:
    """The mean occupancy of the other role's workers that have answered lately.

    `now` is an `OtherOccupancy`: it asks them in the background. The first decision after a pause finds it unknown.
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
            asked = random.sample([*there], min(len(there), _MOST_ASKED))
            await asyncio.gather(*(self._ask(self._directory.instance(each)) for each in asked))
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


#: Decides whether a request goes to a worker of the other role, too.
Decider = Callable[[GenerateRequest], Decision]


@dataclass(frozen=True, slots=True)
class FactSources:
    """Where the facts of a decision come from: this worker, the other role's workers, requests that run here alone."""

    role: Role
    cached: CachedPrefixes
    #: The number of requests that wait for the other role, without those that its workers run. Never waits.
    depth: Callable[[], int]
    own: OwnOccupancy = field(default_factory=OwnOccupancy)
    other: OtherOccupancy = lambda: None
    kept: RequestCount = field(default_factory=RequestCount)

    def facts(self, request: GenerateRequest) -> Facts:
        num_prompt = len(request.token_ids)
        num_cached = self.cached.num_cached(request.token_ids, request.cache_salt, request.dp_rank)
        return Facts(
            num_prompt,
            num_prompt - num_cached,
            self.depth(),
            is_prefill_worker=self.role is Role.PREFILL,
            most_tokens=most_tokens(request),
            num_kept=self.kept.requests,
            kept_tokens=self.kept.tokens,
            own_occupancy=self.own.share,
            other_occupancy=self.other(),
        )


def create_decider(name: str, sources: FactSources, thresholds: Live[Thresholds]) -> Decider:
    """The rule of that name in `DECIDERS`. The facts of each decision are added to the request trace."""
    if name == ALWAYS:  # needs no facts
        return lambda request: Decision(True, ALWAYS)

    def decide(request: GenerateRequest) -> Decision:
        facts = sources.facts(request)
        request.trace.facts |= facts.as_json()
        return thresholds.value.rule(DECIDERS[name]).decide(facts)

    return decide


def auto_rules(name: str) -> tuple[str, ...]:
    """`auto` uses length_and_queue whatever --prefill-decider is, and one of BY_OCCUPANCY as well."""
    return ("length_and_queue", name) if name in BY_OCCUPANCY else ("length_and_queue",)


def agreed(*decisions: Decision) -> Decision:
    """All have to be for both stages."""
    return next((each for each in decisions if not each.both_stages), decisions[0])


def create_auto_decider(name: str, sources: FactSources, thresholds: Live[Thresholds]) -> Decider:
    deciders = [create_decider(each, sources, thresholds) for each in auto_rules(name)]
    return lambda request: agreed(*(decide(request) for decide in deciders))
