"""The only list of deciders. A decider decides whether a request's prefill runs on a peer.

The rules come from the old Dynamo design (length and queue), Dynamo 1.6 (isl_bounding), Dynamo PR 14157
(decode_occupancy) and llm-d (non_cached_tokens). All count the tokens outside the worker's cache. A new decider is one
class and one line in the table. Its fields are its thresholds, each a setting of every worker: a flag, a variable, and
a flag of `trtllm-disagg set`.
"""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from trtllm_disagg.config.settings import NUMBER, SHARE, option
from trtllm_disagg.strategies import WorkerRole


class Decision(NamedTuple):
    #: Whether a peer takes part; else the worker runs both phases.
    both_stages: bool
    #: One word, usable as a metric's label.
    reason: str


class Occupancy(NamedTuple):
    """A share of used KV blocks (0 to 1), and the age in seconds of its oldest report."""

    share: float
    age: float


class Facts(NamedTuple):
    """A decider's facts about a request, its worker and the other stage."""

    #: Prompt tokens, those outside cached blocks, and requests waiting for the other stage.
    num_prompt: int
    uncached: int
    depth: int
    #: Tokens of the prompt and the longest answer.
    max_total_tokens: int
    is_prefill_worker: bool
    #: Requests that the worker serves alone by decision, and their maximum tokens.
    num_kept: int
    kept_tokens: int
    #: The share of the worker's KV blocks in use.
    own_occupancy: float
    #: The mean over the other stage's workers; None: unknown.
    other_occupancy: Occupancy | None

    def as_json(self) -> dict[str, int | float]:
        """The facts for the request trace."""
        facts: dict[str, int | float] = {"uncached": self.uncached, "queue_depth": self.depth}
        if self.other_occupancy is not None:
            share, age = self.other_occupancy
            facts |= {"own_occupancy": round(self.own_occupancy, 4), "other_occupancy": round(share, 4)}
            facts["occupancy_age_ms"] = round(age * 1000)
        return facts


class DeciderRule(Protocol):
    """A frozen dataclass with a default for each field. Rules with a common field share its value."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def decide(self, facts: Facts) -> Decision:
        """Called for each request, so it must not wait."""


@dataclass(frozen=True, slots=True)
class Always:
    """Sends every request to the other stage."""

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
    max_prefill_queue_size: int = option(2, "queue length at which prefills stay local", NUMBER)

    def decide(self, facts: Facts) -> Decision:
        decision = Length.decide(self, facts)
        if decision.both_stages and facts.depth >= self.max_prefill_queue_size:
            return Decision(False, "queue_full")
        return decision


@dataclass(frozen=True, slots=True)
class IslBounding:
    """Stays local if few tokens must be computed and most of the prompt is cached."""

    eff_isl_threshold: int = option(2048, "isl_bounding: max uncached tokens prefilled locally", NUMBER)
    eff_isl_ratio_threshold: float = option(
        0.7, "isl_bounding: max uncached fraction prefilled locally", SHARE
    )

    def decide(self, facts: Facts) -> Decision:
        if facts.uncached >= self.eff_isl_threshold:
            return Decision(True, "long")
        # Unlike a product, a quotient rounds to the threshold's float.
        if facts.uncached / max(1, facts.num_prompt) >= self.eff_isl_ratio_threshold:
            return Decision(True, "low_hit_ratio")
        return Decision(False, "cached")


@dataclass(frozen=True, slots=True)
class NonCachedTokens:
    """llm-d's prefix-based decider; 0 means never."""

    non_cached_tokens: int = option(
        0, "non_cached_tokens: min uncached tokens of a remote prefill; 0: none is remote", NUMBER
    )

    def decide(self, facts: Facts) -> Decision:
        is_long = 0 < self.non_cached_tokens <= facts.uncached
        return Decision(is_long, "long" if is_long else "short")


@dataclass(frozen=True, slots=True)
class DecodeOccupancy:
    """A prefill worker serves a request alone while the decode workers are busy and it is not; at its threshold a
    worker is busy. A decode worker always calls the other stage.
    """

    decode_busy_threshold: float = option(
        0.9, "decode_occupancy: KV occupancy at which decode workers are full", SHARE
    )
    prefill_busy_threshold: float = option(
        0.5, "decode_occupancy: own KV occupancy at which prefill keeps no request", SHARE
    )
    max_concurrent: int = option(8, "decode_occupancy: max concurrent requests that prefill keeps", NUMBER)
    max_budget_tokens: int = option(
        32768, "decode_occupancy: max tokens (prompts and answers) of those requests", NUMBER
    )

    def decide(self, facts: Facts) -> Decision:
        if not facts.is_prefill_worker:
            return Decision(True, ALWAYS)
        if facts.other_occupancy is None:
            return Decision(True, "load_unknown")
        if facts.other_occupancy.share < self.decode_busy_threshold:
            return Decision(True, "decode_free")
        if facts.own_occupancy >= self.prefill_busy_threshold:
            return Decision(True, "prefill_busy")
        kept_tokens = facts.kept_tokens + facts.max_total_tokens
        if facts.num_kept >= self.max_concurrent or kept_tokens > self.max_budget_tokens:
            return Decision(True, "kept_enough")
        return Decision(False, "decode_busy")


#: Needs no facts, so the cache is not queried.
ALWAYS = "always"

DECIDERS: dict[str, type[DeciderRule]] = {
    ALWAYS: Always,
    "length": Length,
    "length_and_queue": LengthAndQueue,
    "isl_bounding": IslBounding,
    "non_cached_tokens": NonCachedTokens,
    "decode_occupancy": DecodeOccupancy,
}
#: Decider by the other stage's occupancy -> the roles that query it.
BY_OCCUPANCY: dict[str, tuple[WorkerRole, ...]] = {"decode_occupancy": ("prefill",)}


def auto_rules(name: str) -> tuple[str, ...]:
    """The rules of `auto`: always length_and_queue, and --prefill-decider if it is one of BY_OCCUPANCY."""
    return ("length_and_queue", name) if name in BY_OCCUPANCY else ("length_and_queue",)


def agreed(*decisions: Decision) -> Decision:
    """Both stages only if all decisions say so."""
    return next((each for each in decisions if not each.both_stages), decisions[0])
