"""The one list of deciders: when a request's prefill leaves the worker that it was routed to.

The rules are those of the old Dynamo design (length and queue), of Dynamo 1.6 (isl_bounding) and of llm-d
(non_cached_tokens). All count real tokens, without those of blocks in the worker's cache. A new decider is one
function and one line here; `config.thresholds.Thresholds` has the thresholds that it may compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Decision(NamedTuple):
    remote: bool
    #: One word, fit for a metric's label.
    reason: str


class Facts(NamedTuple):
    """Tokens of the prompt, those of them that no cached block has, and requests that wait for the other stage."""

    num_prompt: int
    uncached: int
    depth: int


class Limits(Protocol):
    """`config.thresholds.Thresholds`."""

    @property
    def max_local_prefill_length(self) -> int: ...
    @property
    def max_prefill_queue_size(self) -> int: ...
    @property
    def eff_isl_threshold(self) -> int: ...
    @property
    def eff_isl_ratio_threshold(self) -> float: ...
    @property
    def non_cached_tokens(self) -> int: ...


Rule = Callable[[Facts, Limits], Decision]


def _always(facts: Facts, limits: Limits) -> Decision:
    """Every request goes to the other stage."""
    return Decision(True, "always")


def _length(facts: Facts, limits: Limits) -> Decision:
    is_long = facts.uncached > limits.max_local_prefill_length
    return Decision(is_long, "long" if is_long else "short")


def _length_and_queue(facts: Facts, limits: Limits) -> Decision:
    decision = _length(facts, limits)
    if decision.remote and facts.depth >= limits.max_prefill_queue_size:
        return Decision(False, "queue_full")
    return decision


def _isl_bounding(facts: Facts, limits: Limits) -> Decision:
    """Stays when little is to compute, and most of the prompt is there."""
    if facts.uncached >= limits.eff_isl_threshold:
        return Decision(True, "long")
    # A quotient rounds to the number that the threshold was read as; a product may be above that.
    if facts.uncached / max(1, facts.num_prompt) >= limits.eff_isl_ratio_threshold:
        return Decision(True, "low_hit_ratio")
    return Decision(False, "cached")


def _non_cached_tokens(facts: Facts, limits: Limits) -> Decision:
    """llm-d's prefix-based decider; 0 means never."""
    least = limits.non_cached_tokens
    is_long = 0 < least <= facts.uncached
    return Decision(is_long, "long" if is_long else "short")


#: The one that asks for no facts: nothing is looked up in the cache for it.
ALWAYS = "always"

DECIDERS: dict[str, Rule] = {
    ALWAYS: _always,
    "length": _length,
    "length_and_queue": _length_and_queue,
    "isl_bounding": _isl_bounding,
    "non_cached_tokens": _non_cached_tokens,
}
