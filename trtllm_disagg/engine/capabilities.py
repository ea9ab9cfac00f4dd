"""What only some engines can do beyond TensorRT-LLM's LLM API, and what happens with an engine that cannot. For an
engine that does not count the handoffs with KV that may still be read, `HandoffsHeld` counts what this worker can know.

An engine is asked once, after it has started. A test keeps the table of `docs/explanation/tensorrt-llm.md` equal.
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

#: A record of statistics arrives within this time after the step that it describes.
_DELAY_SECONDS = 1.0


class HandoffsHeld:
    """Counts handoffs for engines that do not. A handoff ends when decode is known to have its KV, when later
    statistics show that the engine holds no KV, or with its lease. Missing statistics do not mean that it holds none.
    """

    def __init__(self, lease_seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._ids = itertools.count()
        #: Number of a handoff -> when it was made.
        self._made: dict[int, float] = {}
        #: Rank -> whether its newest record shows no KV in use.
        self._holds_none: dict[Any, bool] = {}
        #: When the newest record came, if no rank holds any KV.
        self._quiet_since: float | None = None

    def hold(self) -> Callable[[], None]:
        """Count one handoff. Returns a function that ends it, and may be called more than once."""
        number = next(self._ids)
        self._made[number] = self._clock()
        return partial(self._end, number)

    def count(self) -> int:
        self._end_expired()
        return len(self._made)

    def oldest_seconds(self) -> float:
        """For how long the oldest handoff has been held; 0 when there is none."""
        self._end_expired()
        made = list(self._made.values())
        return max(0.0, self._clock() - min(made)) if made else 0.0

    @property
    def has_statistics(self) -> bool:
        return bool(self._holds_none)

    def update(self, stat: Mapping[str, Any]) -> None:
        """Read one record of `get_stats_async`; every attention-DP rank sends its own. Thread-safe."""
        self._holds_none[stat.get("attentionDpRank")] = _holds_none(stat)
        if not all(list(self._holds_none.values())):
            self._quiet_since = None
            return
        self._quiet_since = self._clock()
        self._end_before(self._quiet_since - _DELAY_SECONDS)

    def _end_expired(self) -> None:
        now, quiet_since = self._clock(), self._quiet_since
        self._end_before(now - self.lease_seconds)
        if quiet_since is not None and now - quiet_since >= _DELAY_SECONDS:
            # A record of a step with a handoff made before `quiet_since` would have arrived by now.
            self._end_before(quiet_since)

    def _end(self, number: int) -> None:
        self._made.pop(number, None)

    def _end_before(self, when: float) -> None:
        for number, made in list(self._made.items()):
            if made <= when:
                self._end(number)


def _holds_none(stat: Mapping[str, Any]) -> bool:
    """In TensorRT-LLM requests with KV that is still to be read are not active, so no block may be in use either. A
    block that the engine keeps for itself can only make handoffs appear to last longer, never shorter.
    """
    active = stat.get("numActiveRequests", 1) + stat.get("numQueuedRequests", 0)
    return bool(active == 0 and (stat.get("kvCacheStats") or {}).get("usedNumBlocks") == 0)


@dataclass(frozen=True, slots=True)
class Capability:
    """`is_there` tells whether an LLM has it; `without` describes what happens with an LLM that has not."""

    name: str
    is_there: Callable[[Any], bool]
    without: str


def _has(name: str) -> Callable[[Any], bool]:
    """The LLM has an attribute that the embedded engine has and TensorRT-LLM has not."""
    return lambda llm: getattr(llm, name, None) is not None


def _is_true(name: str) -> Callable[[Any], bool]:
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
    _is_true("releases_handoffs"),
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
    _is_true("is_exact"),
    "an answer goes on elsewhere behind the tokens that the client has, which may differ from what it would have been",
)
REPORTS_ITS_LENGTH = Capability(
    "tell its longest sequence",
    lambda llm: _reported_length(llm) is not None,
    "the model card has no context_length, the frontend reads the model's own, and the engine refuses what is too long",
)
NAMES_ERRORS = Capability(
    "name an error's category",
    _is_true("names_errors"),
    "the words of its message decide: a length is the caller's fault (400), a failed "
    "KV transfer goes to the next fallback step, the "
    "rest is the engine's (500)",
)
HAS_CONTEXT_ENDPOINT = Capability(
    "offer a context endpoint to decode engines",
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
    REPORTS_ITS_LENGTH,
    NAMES_ERRORS,
    HAS_CONTEXT_ENDPOINT,
    TAKES_RANKS,
)


class Capabilities:
    """The answers of one LLM."""

    def __init__(self, llm: Any) -> None:
        self._there = {each.name for each in CAPABILITIES if each.is_there(llm)}
        #: Tokens of prompt and answer together; None when the engine does not report it.
        self.max_seq_len = _reported_length(llm)

    def __contains__(self, capability: Capability) -> bool:
        return capability.name in self._there

    def missing(self) -> list[str]:
        """One line for each missing capability, for the log of a start."""
        return [f"{each.name}: {each.without}" for each in CAPABILITIES if each not in self]


def _reported_length(llm: Any) -> int | None:
    """The longest sequence that the loaded engine reports, else its configured value. The model's number of positions
    does not count: engines stretch it, and shorten it to what the KV cache holds.
    """
    for length in (
        getattr(llm, "max_seq_len", None),
        getattr(getattr(llm, "args", None), "max_seq_len", None),
    ):
        if isinstance(length, int) and length > 0:
            return length
    return None
