"""What only some engines can do beyond TensorRT-LLM's LLM API, and what happens with the others.

An engine is asked once, after its start. A test compares the table in `docs/explanation/tensorrt-llm.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Capability:
    """`is_there`: whether an LLM has it; `without`: what happens if not."""

    name: str
    is_there: Callable[[Any], bool]
    without: str


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
    "a decode worker fetches one token of a handoff that no decode uses; without a decode worker, the KV stays until "
    "cache_transceiver_config.kv_transfer_timeout_ms",
)
COUNTS_REQUESTS = Capability(
    "count its requests",
    lambda llm: getattr(llm, "num_active_requests", None) is not None,
    "a leaving worker waits for the requests it has started. For handoffs it waits until a statistic shows the engine "
    "idle with no KV block in use, and gives the engine a step each second to get one; kv_transfer_timeout_ms and "
    "--drain-seconds limit that",
)
IS_EXACT = Capability(
    "give the same answer again",
    _is_true("is_exact"),
    "after a failure another attempt continues behind the client's tokens, perhaps not as the first would have",
)
REPORTS_ITS_LENGTH = Capability(
    "report its longest sequence",
    lambda llm: _reported_length(llm) is not None,
    "the model card has no context_length, the frontend reads the model's own, and the engine refuses what is too long",
)
NAMES_ERRORS = Capability(
    "name an error's category",
    _is_true("names_errors"),
    "the words of its message decide: a length, an option or a guide is the caller's fault (400), a failed KV "
    "transfer leads to the next fallback step, and other errors are the engine's (500)",
)
HAS_CONTEXT_ENDPOINT = Capability(
    "offer a context endpoint to decode engines",
    lambda llm: bool((getattr(llm, "disaggregated_params", None) or {}).get("ctx_info_endpoint")),
    "the worker refuses --schedule-style generation_first at its start",
)
REPORTS_CACHED_PROMPTS = Capability(
    "give log probabilities of a prompt with a cached prefix",
    _is_true("reports_cached_prompts"),
    "a request for them (`echo`, `prompt_logprobs`) reuses no cached KV, by a cache salt of its own, and is aborted at "
    "its first output at the earliest: before, an abort would damage the answers to other requests",
)
TAKES_RANKS = Capability(
    "take a rank of attention DP", _takes("scheduling_params"), "a worker refuses enable_attention_dp"
)
TAKES_PRIORITIES = Capability(
    "take a priority", _takes("priority"), "the engine serves requests in the order of their arrival"
)

CAPABILITIES = (
    RELEASES_HANDOFFS,
    COUNTS_REQUESTS,
    IS_EXACT,
    REPORTS_ITS_LENGTH,
    NAMES_ERRORS,
    HAS_CONTEXT_ENDPOINT,
    REPORTS_CACHED_PROMPTS,
    TAKES_RANKS,
    TAKES_PRIORITIES,
)


class Capabilities:
    """The answers of one LLM."""

    def __init__(self, llm: Any) -> None:
        self._there = {each.name for each in CAPABILITIES if each.is_there(llm)}
        #: Tokens of prompt and answer; None if not reported.
        self.max_seq_len = _reported_length(llm)

    def __contains__(self, capability: Capability) -> bool:
        return capability.name in self._there

    def missing(self) -> list[str]:
        """One line per missing capability, for the start's log."""
        return [f"{each.name}: {each.without}" for each in CAPABILITIES if each not in self]


def _reported_length(llm: Any) -> int | None:
    """The longest sequence by the loaded engine's report, else its configuration. The model's positions do not count:
    engines stretch them, and shorten them to the KV cache.
    """
    for length in (
        getattr(llm, "max_seq_len", None),
        getattr(getattr(llm, "args", None), "max_seq_len", None),
    ):
        if isinstance(length, int) and length > 0:
            return length
    return None


def kv_transport_of(llm: Any) -> str | None:
    """The reported transport, else the configured one, perhaps DEFAULT."""
    configured = _configured(llm, "cache_transceiver_config", "backend")
    transport: str | None = getattr(llm, "kv_transport", None) or configured
    return transport


def event_buffer_of(llm: Any) -> int:
    """The number of cache events that the engine keeps until a poll."""
    return _configured(llm, "kv_cache_config", "event_buffer_max_size") or 0


def block_size_of(llm: Any) -> int | None:
    """Tokens per KV block, configured or chosen by the engine; None if not reported."""
    size: int | None = _configured(llm, "kv_cache_config", "tokens_per_block")
    return size


def reuses_blocks(llm: Any) -> bool:
    """Whether the engine keeps blocks for later prompts; true if not reported."""
    return _configured(llm, "kv_cache_config", "enable_block_reuse") is not False


def _configured(llm: Any, group: str, name: str) -> Any:
    given = getattr(getattr(llm, "args", None), group, None)
    return given.get(name) if isinstance(given, dict) else getattr(given, name, None)
