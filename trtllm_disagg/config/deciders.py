"""The one list of deciders. A decider decides whether a request's prefill runs on a worker of the other role.

The rules are those of the old Dynamo design (length and queue), of Dynamo 1.6 (isl_bounding), of Dynamo PR 14157
(decode_occupancy) and of llm-d (non_cached_tokens). All count tokens, without those of blocks in the worker's cache. A
new decider is one class and one line in the table. Its fields are its thresholds, each a setting of every worker: a
flag, a variable, a key of the policy file, and a flag of `trtllm-disagg set`.
"""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from trtllm_disagg.config.settings import NUMBER, SHARE, option
from trtllm_disagg.strategies import WorkerRole


class Decision(NamedTuple):
    #: A worker of the other role takes part; else the worker that has the request does both stages.
    both_stages: bool
    #: One word, fit for a metric's label.
    reason: str


class Occupancy(NamedTuple):
    """A share of used KV blocks, and the age in seconds of its oldest report."""

    share: float
    age: float


class Facts(NamedTuple):
    """The facts about a request, its worker and the other stage on which a decider decides."""

    #: Tokens of the prompt, its tokens outside of cached blocks, and requests that wait for the other stage.
    num_prompt: int
    uncached: int
    depth: int
    #: The prompt and all that may be generated.
    most_tokens: int
    is_prefill_worker: bool
    #: Requests that the worker serves alone by decision, and the largest number of tokens that they may use.
    num_kept: int
    kept_tokens: int
    #: The share of the worker's KV blocks that is in use.
    own_occupancy: float
    #: The mean over the other stage's workers; None when it is not known.
    other_occupancy: Occupancy | None

    def as_json(self) -> dict[str, int | float]:
        """The facts for the request trace."""
        facts: dict[str, int | float] = {"uncached": self.uncached, "queue_depth": self.depth}
        if self.other_occupancy is not None:
            share, age = self.other_occupancy
            facts |= {
                "own_occupancy": round(self.own_occupancy, 4),
                "other_occupancy": round(share, 4),
                "occupancy_age_ms": round(age * 1000),
            }
        return facts


class DeciderRule(Protocol):
    """A frozen dataclass with a default for each field. Rules with a common field share its value."""

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
        if decision.both_stages and facts.depth >= self.max_prefill_queue_size:
            return Decision(False, "queue_full")
        return decision


@dataclass(frozen=True, slots=True)
class IslBounding:
    """Stays local when few tokens have to be computed, and most of the prompt is cached."""

    eff_isl_threshold: int = option(2048, "isl_bounding: max uncached tokens prefilled locally", NUMBER)
    eff_isl_ratio_threshold: float = option(
        0.7, "isl_bounding: max uncached fraction prefilled locally", SHARE
    )

    def decide(self, facts: Facts) -> Decision:
        if facts.uncached >= self.eff_isl_threshold:
            return Decision(True, "long")
        # A quotient, unlike a product, rounds to the same float as the threshold.
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


@dataclass(frozen=True, slots=True)
class DecodeOccupancy:
    """A prefill worker serves a request alone while the decode workers are busy and it is not. A decode worker always
    calls the other stage. A worker at its threshold is busy.
    """

    decode_busy_threshold: float = option(
        0.9, "decode_occupancy: share of used KV blocks from which on decode workers are full", SHARE
    )
    prefill_busy_threshold: float = option(
        0.5,
        "decode_occupancy: share of its own used KV blocks from which on a prefill worker keeps none",
        SHARE,
    )
    max_concurrent: int = option(
        8, "decode_occupancy: max requests that a prefill worker keeps at once", NUMBER
    )
    max_budget_tokens: int = option(
        32768, "decode_occupancy: max tokens, prompts and answers, of the requests that it keeps", NUMBER
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
        if (
            facts.num_kept >= self.max_concurrent
            or facts.kept_tokens + facts.most_tokens > self.max_budget_tokens
        ):
            return Decision(True, "kept_enough")
        return Decision(False, "decode_busy")


#: This decider uses no facts, so the cache is not queried for it.
ALWAYS = "always"

DECIDERS: dict[str, type[DeciderRule]] = {
    ALWAYS: Always,
    "length": Length,
    "length_and_queue": LengthAndQueue,
    "isl_bounding": IslBounding,
    "non_cached_tokens": NonCachedTokens,
    "decode_occupancy": DecodeOccupancy,
}
#: The deciders that need the occupancy of the other stage -> the roles whose workers decide by it, and so ask for it.
BY_OCCUPANCY: dict[str, tuple[WorkerRole, ...]] = {"decode_occupancy": ("prefill",)}
