"""Conditional disaggregation: is a request worth the way to another worker, or does this one answer it alone?

The rules are those of the old Dynamo design (length and queue), of Dynamo 1.6 (isl_bounding) and of llm-d
(non_cached_tokens). All count real tokens, without those whose blocks are in this worker's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

# How much of a prompt this worker's engine has in its cache, from the engine's own cache events.


#: (block before it, its tokens as bytes); the first block hangs on its salt.
_Key = tuple[int | str, bytes]


class CachedPrefix:
    """Hears of whole blocks as the KV router does, and answers in O(blocks of the prompt). As large as the pool."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._hashes: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def num_cached(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Tokens from the start. The last one of a prompt is computed in any case: it gives the first logits."""
        count = 0
        before: int | str = salt or ""
        for block in self._blocks(tokens):
            found = self._hashes.get((before, block))
            if found is None:
                break
            before, count = found, count + self._size
        return min(count, len(tokens) - 1)

    # -- what `publisher.kv_events` tells

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
        for block, block_hash in zip(self._blocks(token_ids), block_hashes, strict=True):
            self._forget(block_hash)
            self._hashes[before, block] = block_hash
            self._keys[block_hash] = before, block
            before = block_hash

    def publish_removed(self, block_hashes: list[int]) -> None:
        for block_hash in block_hashes:
            self._forget(block_hash)

    def clear(self) -> None:
        """Events were lost: what is not known for sure counts as not cached until it is stored again."""
        self._hashes.clear()
        self._keys.clear()

    def _forget(self, block_hash: int) -> None:
        key = self._keys.pop(block_hash, None)
        if key is not None and self._hashes.get(key) == block_hash:
            del self._hashes[key]

    def _blocks(self, tokens: Sequence[int]) -> Iterator[bytes]:
        packed = array("q", tokens).tobytes()
        width = self._size * 8
        return (packed[at : at + width] for at in range(0, len(packed) - width + 1, width))


class QueueDepth(Protocol):
    def depth(self) -> int:
        """Requests that wait for the other stage, beyond those that it works on. Never waits itself."""
        ...


class Decision(NamedTuple):
    remote: bool
    #: One word, fit for a metric's label.
    reason: str


class Facts(NamedTuple):
    num_prompt: int
    uncached: int
    depth: int


Rule = Callable[[Facts, Thresholds], Decision]


def _length(facts: Facts, limits: Thresholds) -> Decision:
    is_long = facts.uncached > limits.max_local_prefill_length
    return Decision(is_long, "long" if is_long else "short")


def _length_and_queue(facts: Facts, limits: Thresholds) -> Decision:
    decision = _length(facts, limits)
    if decision.remote and facts.depth >= limits.max_prefill_queue_size:
        return Decision(False, "queue_full")
    return decision


def _isl_bounding(facts: Facts, limits: Thresholds) -> Decision:
    """Stays when little is to compute, and most of the prompt is there (facts: dynamo.md section 9)."""
    if facts.uncached >= limits.eff_isl_threshold:
        return Decision(True, "long")
    # A quotient rounds to the number that the threshold was read as; a product may be above that.
    if facts.uncached / max(1, facts.num_prompt) >= limits.eff_isl_ratio_threshold:
        return Decision(True, "low_hit_ratio")
    return Decision(False, "cached")


def _non_cached_tokens(facts: Facts, limits: Thresholds) -> Decision:
    """llm-d's prefix-based decider; 0 means never."""
    least = limits.non_cached_tokens
    is_long = 0 < least <= facts.uncached
    return Decision(is_long, "long" if is_long else "short")


_RULES: dict[str, Rule] = {
    "length": _length,
    "length_and_queue": _length_and_queue,
    "isl_bounding": _isl_bounding,
    "non_cached_tokens": _non_cached_tokens,
}


class Decider(Protocol):
    def decide(self, request: GenerateRequest) -> Decision: ...


class Always:
    """Every request goes to the other stage."""

    def decide(self, request: GenerateRequest) -> Decision:
        return Decision(True, "always")


class ByRule:
    def __init__(
        self, rule: Rule, cached: CachedPrefix, queue: QueueDepth, thresholds: Live[Thresholds]
    ) -> None:
        self._rule = rule
        self._cached = cached
        self._queue = queue
        self._thresholds = thresholds

    def decide(self, request: GenerateRequest) -> Decision:
        """What it was decided on is told in the journey."""
        num_prompt = len(request.token_ids)
        num_cached = self._cached.num_cached(request.token_ids, request.cache_salt)
        facts = Facts(num_prompt, num_prompt - num_cached, self._queue.depth())
        request.journey.facts |= {"uncached": facts.uncached, "queue_depth": facts.depth}
        return self._rule(facts, self._thresholds.value)


def create_decider(
    name: str, cached: CachedPrefix, queue: QueueDepth, thresholds: Live[Thresholds]
) -> Decider:
    return Always() if name == "always" else ByRule(_RULES[name], cached, queue, thresholds)


def conditional(decider: Decider, local: Generate, remote: Generate) -> Generate:
    """One of both, decided once a request."""

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        decision = decider.decide(request)
        request.journey.chose(request.journey.strategy if decision.remote else "local", decision.reason)
        return (remote if decision.remote else local)(request, context)

    return generate


# `--disaggregation-strategy auto`: the order of each request by its length, by queues and by who is well.


class Auto:
    """local: little to compute, a queue in front of the other stage, or nobody there who is well.

    Otherwise the order whose first stage this worker is; the other order when this worker decodes as much as fits
    into its batch, so that another decode worker can be found.
    """

    def __init__(
        self,
        decider: Decider,
        ways: dict[str, Generate],
        orders: tuple[str, str],
        num_well: Callable[[], int],
        max_batch_size: int,
    ) -> None:
        """`orders`: this worker's own, and the other one."""
        self._decider = decider
        self._ways = ways
        self._own, self._other = orders
        self._num_well = num_well
        self._room = max_batch_size
        self._running = 0

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        name, reason = self._chosen(request)
        request.journey.chose(name, f"auto_{reason}")
        self._running += 1
        try:
            async with aclosing(self._ways[name](request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._running -= 1

    def _chosen(self, request: GenerateRequest) -> tuple[str, str]:
        decision = self._decider.decide(request)
        if not decision.remote:
            return "local", decision.reason
        if self._num_well() == 0:
            return "local", "no_peer"
        if self._running >= self._room:
            return self._other, "busy"
        return self._own, decision.reason
