"""What only some engines can do beyond TensorRT-LLM's LLM API, and what happens with an engine that cannot: for one
that does not say which KV another worker may still read, `HandoffsHeld` counts as far as this worker can know.

Asked once, when the engine is there. `docs/explanation/tensorrt-llm.md` has the same table, as a test checks.
"""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

#: A statistic may be as old as its way here.
_OLD_SECONDS = 1.0


class HandoffsHeld:
    """For engines that do not count them. A handoff ends when decode is known to have its KV, when the engine is seen
    to hold none after it, or with its lease. That nothing is known of the engine does not mean that it holds none.
    """

    def __init__(self, lease_seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._ids = itertools.count()
        #: When each was made.
        self._made: dict[int, float] = {}
        self._holds_none: dict[Any, bool] = {}
        #: When the newest statistic came, if no rank holds any.
        self._quiet_since: float | None = None

    def hold(self) -> Callable[[], None]:
        """Ends it; may be called more than once."""
        number = next(self._ids)
        self._made[number] = self._clock()
        return partial(self._end, number)

    def count(self) -> int:
        self._end_what_is_over()
        return len(self._made)

    def oldest_seconds(self) -> float:
        """For how long it has been held; 0 when there is none."""
        self._end_what_is_over()
        made = list(self._made.values())
        return max(0.0, self._clock() - min(made)) if made else 0.0

    @property
    def is_told(self) -> bool:
        """There are statistics."""
        return bool(self._holds_none)

    def update(self, stat: Mapping[str, Any]) -> None:
        """One record of `get_stats_async`; every rank of attention DP sends its own. From any thread."""
        self._holds_none[stat.get("attentionDpRank")] = _holds_none(stat)
        if not all(list(self._holds_none.values())):
            self._quiet_since = None
            return
        self._quiet_since = self._clock()
        self._end_before(self._quiet_since - _OLD_SECONDS)

    def _end_what_is_over(self) -> None:
        now, quiet_since = self._clock(), self._quiet_since
        self._end_before(now - self.lease_seconds)
        if quiet_since is not None and now - quiet_since >= _OLD_SECONDS:
            # The step of a handoff that the statistic did not know would have been heard of by now.
            self._end_before(quiet_since)

    def _end(self, number: int) -> None:
        self._made.pop(number, None)

    def _end_before(self, when: float) -> None:
        for number, made in list(self._made.items()):
            if made <= when:
                self._end(number)


def _holds_none(stat: Mapping[str, Any]) -> bool:
    """TensorRT-LLM's active requests are without those with KV still to be read, so no block may be in use. One
    that it keeps for itself makes handoffs look longer, never shorter.
    """
    active = stat.get("numActiveRequests", 1) + stat.get("numQueuedRequests", 0)
    return bool(active == 0 and (stat.get("kvCacheStats") or {}).get("usedNumBlocks") == 0)


@dataclass(frozen=True, slots=True)
class Capability:
    """`is_there` asks an LLM; `without` is what happens where the answer is no."""

    name: str
    is_there: Callable[[Any], bool]
    without: str


def _has(name: str) -> Callable[[Any], bool]:
    """An attribute; of the embedded engine, which TensorRT-LLM has not."""
    return lambda llm: getattr(llm, name, None) is not None


def _says(name: str) -> Callable[[Any], bool]:
    return lambda llm: bool(getattr(llm, name, False))


def _takes(keyword: str) -> Callable[[Any], bool]:
    def takes(llm: Any) -> bool:
        try:
            parameters = inspect.signature(llm.generate_async).parameters
        except (AttributeError, TypeError, ValueError):
            return False
        return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    return takes


RELEASES_HANDOFFS = Capability(
    "release a handoff",
    _says("releases_handoffs"),
    "a decode worker fetches one token of a handoff that no decode takes; where there is none to ask, the KV stays "
    "until cache_transceiver_config.kv_transfer_timeout_ms",
)
COUNTS_REQUESTS = Capability(
    "count its requests",
    _has("num_active_requests"),
    "a leaving worker waits for the requests it has started, and for each handoff until a statistic shows the engine "
    "idle with no KV block in use (it gives the engine a step each second, to hear one), kv_transfer_timeout_ms is "
    "over, or --drain-seconds are",
)
IS_EXACT = Capability(
    "give the same answer again",
    _says("is_exact"),
    "an answer goes on elsewhere behind the tokens that the client has, which may differ from what it would have been",
)
TELLS_ITS_LENGTH = Capability(
    "tell its longest sequence",
    lambda llm: _told_length(llm) is not None,
    "the model card has no context_length, the frontend reads the model's own, and the engine refuses what is too long",
)
NAMES_ERRORS = Capability(
    "name an error's category",
    _says("names_errors"),
    "the words of its message decide: a length is the caller's fault (400), a KV transfer climbs the fallback, the "
    "rest is the engine's (500)",
)
CAN_BE_MET = Capability(
    "be met by a decode engine",
    lambda llm: bool((getattr(llm, "disaggregated_params", None) or {}).get("ctx_info_endpoint")),
    "--schedule-style generation_first is refused at the start",
)
TAKES_RANKS = Capability(
    "take a rank of attention DP", _takes("scheduling_params"), "enable_attention_dp is refused at the start"
)

CAPABILITIES = (
    RELEASES_HANDOFFS,
    COUNTS_REQUESTS,
    IS_EXACT,
    TELLS_ITS_LENGTH,
    NAMES_ERRORS,
    CAN_BE_MET,
    TAKES_RANKS,
)


class Capabilities:
    """The answers of one LLM."""

    def __init__(self, llm: Any) -> None:
        self._there = {each.name for each in CAPABILITIES if each.is_there(llm)}
        #: prompt and answer together, None when the engine does not tell.
        self.max_seq_len = _told_length(llm)

    def __contains__(self, capability: Capability) -> bool:
        return capability.name in self._there

    def missing(self) -> list[str]:
        """One line each, for the log of a start."""
        return [f"{each.name}: {each.without}" for each in CAPABILITIES if each not in self]


def _told_length(llm: Any) -> int | None:
    """What the loaded engine says. Its configured value counts, a model's own number of positions does not: engines
    stretch it, and shorten it to what the KV cache holds.
    """
    for length in (
        getattr(llm, "max_seq_len", None),
        getattr(getattr(llm, "args", None), "max_seq_len", None),
    ):
        if isinstance(length, int) and length > 0:
            return length
    return None
