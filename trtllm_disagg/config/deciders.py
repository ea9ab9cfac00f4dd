"""The one list of deciders: when a request's prefill leaves the worker that it was routed to.

The rules are those of the old Dynamo design (length and queue), of Dynamo 1.6 (isl_bounding) and of llm-d
(non_cached_tokens). All count real tokens, without those of blocks in the worker's cache. A new decider is one class
and one line in the table. Its fields are its thresholds, each a setting of every worker: a flag, a variable, a key of
the policy file, and what `trtllm-disagg set` changes in a running worker.
"""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from trtllm_disagg.config.settings import NUMBER, SHARE, option


class Decision(NamedTuple):
    remote: bool
    #: One word, fit for a metric's label.
    reason: str


class Facts(NamedTuple):
    """Tokens of the prompt, those of them that no cached block has, and requests that wait for the other stage."""

    num_prompt: int
    uncached: int
    depth: int


class Rule(Protocol):
    """A frozen dataclass whose fields all have a default. Rules that have a field in common share its value."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def decide(self, facts: Facts) -> Decision: ...


@dataclass(frozen=True, slots=True)
class Always:
    """Every request goes to the other stage."""

    def decide(self, facts: Facts) -> Decision:
        return Decision(True, ALWAYS)


@dataclass(frozen=True, slots=True)
class Length:
    max_local_prefill_length: int = option(1000, "max uncached tokens prefilled locally", NUMBER)

    def decide(self, facts: Facts) -> Decision:
        is_long = facts.uncached > self.max_local_prefill_length
        return Decision(is_long, "long" if is_long else "short")


@dataclass(frozen=True, slots=True)
class LengthAndQueue(Length):
    max_prefill_queue_size: int = option(2, "waiting prefills from which on further ones stay local", NUMBER)

    def decide(self, facts: Facts) -> Decision:
        decision = Length.decide(self, facts)
        if decision.remote and facts.depth >= self.max_prefill_queue_size:
            return Decision(False, "queue_full")
        return decision


@dataclass(frozen=True, slots=True)
class IslBounding:
    """Stays when little is to compute, and most of the prompt is there."""

    eff_isl_threshold: int = option(2048, "isl_bounding: max uncached tokens prefilled locally", NUMBER)
    eff_isl_ratio_threshold: float = option(
        0.7, "isl_bounding: max uncached fraction prefilled locally", SHARE
    )

    def decide(self, facts: Facts) -> Decision:
        if facts.uncached >= self.eff_isl_threshold:
            return Decision(True, "long")
        # A quotient rounds to the number that the threshold was read as; a product may be above that.
        if facts.uncached / max(1, facts.num_prompt) >= self.eff_isl_ratio_threshold:
            return Decision(True, "low_hit_ratio")
        return Decision(False, "cached")


@dataclass(frozen=True, slots=True)
class NonCachedTokens:
    """llm-d's prefix-based decider; 0 means never."""

    non_cached_tokens: int = option(
        0, "non_cached_tokens: uncached tokens from which on a prefill is remote", NUMBER
    )

    def decide(self, facts: Facts) -> Decision:
        is_long = 0 < self.non_cached_tokens <= facts.uncached
        return Decision(is_long, "long" if is_long else "short")


#: The one that asks for no facts: nothing is looked up in the cache for it.
ALWAYS = "always"

DECIDERS: dict[str, type[Rule]] = {
    ALWAYS: Always,
    "length": Length,
    "length_and_queue": LengthAndQueue,
    "isl_bounding": IslBounding,
    "non_cached_tokens": NonCachedTokens,
}
