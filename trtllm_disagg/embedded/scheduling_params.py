"""SchedulingParams as TensorRT-LLM's LLM API has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """Attention data parallelism has one rank here, so there is nothing to choose."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None
