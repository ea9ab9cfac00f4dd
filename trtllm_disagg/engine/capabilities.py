"""What only some engines can do beyond TensorRT-LLM's LLM API, and what happens with an engine that cannot.

Asked once, when the engine is there. `docs/explanation/tensorrt-llm.md` has the same table, as a test checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
    "idle with no KV block in use, kv_transfer_timeout_ms is over, or --drain-seconds are",
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
    "take a rank of attention DP",
    _takes("scheduling_params"),
    "enable_attention_dp is refused at the start",
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
    for told in (getattr(llm, "max_seq_len", None), getattr(getattr(llm, "args", None), "max_seq_len", None)):
        if isinstance(told, int) and told > 0:
            return told
    return None
