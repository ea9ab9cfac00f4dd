"""DisaggregatedParams as TensorRT-LLM's LLM API has it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")


class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


class RequestType(Enum):
    """The name of a phase in TensorRT-LLM's runtime."""

    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


@dataclass(frozen=True, slots=True)
class ContextPhaseParams:
    """What TensorRT-LLM's runtime gets of a handoff."""

    first_gen_tokens: list[int]
    req_id: int | None
    opaque_state: bytes | None
    draft_tokens: list[int] | None
    ctx_dp_rank: int | None
    ctx_info_endpoint: str | list[str] | None


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """What one phase tells the other.

    `opaque_state` belongs to the engine: which engine holds the KV, in which blocks. `first_gen_log_probs` has one dict
    (token id -> Logprob) for the first token.
    """

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | list[str] | None = None
    schedule_style: DisaggScheduleStyle | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_item_runs: list[Any] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in REQUEST_TYPES:
                raise ValueError(
                    f"Unknown request type: {self.request_type}. Must be one of {', '.join(REQUEST_TYPES)}"
                )

    def get_request_type(self) -> RequestType:
        """Raises ValueError when there is none."""
        if self.request_type is None:
            raise ValueError(f"Unknown request type: None. Must be one of {', '.join(REQUEST_TYPES)}")
        return RequestType[f"REQUEST_TYPE_{self.request_type.upper()}"]

    def get_context_phase_params(self) -> ContextPhaseParams:
        """Both phases go by disagg_request_id where there is one."""
        return ContextPhaseParams(
            first_gen_tokens=self.first_gen_tokens or [],
            req_id=self.ctx_request_id if self.disagg_request_id is None else self.disagg_request_id,
            opaque_state=self.opaque_state,
            draft_tokens=self.draft_tokens,
            ctx_dp_rank=self.ctx_dp_rank,
            ctx_info_endpoint=self.ctx_info_endpoint,
        )


MIN_GLOBAL_ID = 1 << 40


def get_global_disagg_request_id(node_id: int, process_id: int = 0) -> int:
    """A request id that no other process makes: node (8 bits), process (6), and 49 random bits where TensorRT-LLM has
    the clock and a counter, since engines meet by it and no other program is to guess it.

    Raises ValueError for a node_id outside [0, 256) or a process_id outside [0, 64).
    """
    if not 0 <= node_id < 1 << 8:
        raise ValueError(f"node_id must be in [0, 256), got {node_id}")
    if not 0 <= process_id < 1 << 6:
        raise ValueError(f"process_id must be in [0, 64), got {process_id}")
    high = secrets.randbelow((1 << 39) - (1 << 17))  # the sum stays below 2^63
    return (high << 24 | node_id << 16 | process_id << 10 | secrets.randbits(10)) + MIN_GLOBAL_ID
