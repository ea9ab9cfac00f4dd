"""Conditional disaggregation: is a request worth the way to another worker, or does this one answer it alone?

The rules are those of the old Dynamo design (length and queue), of Dynamo 1.6 (isl_bounding) and of llm-d
(non_cached_tokens). All count real tokens, without those whose blocks are in this worker's cache.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple, Protocol

from trtllm_disagg.handlers.cached_prefix import CachedPrefix
from trtllm_disagg.handlers.live import Live
from trtllm_disagg.thresholds import Thresholds
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


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
