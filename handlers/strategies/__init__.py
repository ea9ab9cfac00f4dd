"""One file a strategy, one line here. Nobody else asks which strategy runs."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from trtllm_disagg.config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engine import Engine
from trtllm_disagg.handlers.remote import StageClient
from trtllm_disagg.types import Generate

STRATEGIES = {
    "agg": "trtllm_disagg.handlers.strategies.agg",
    "prefill_first": "trtllm_disagg.handlers.strategies.prefill_first",
    "decode_first": "trtllm_disagg.handlers.strategies.decode_first",
    "router": "trtllm_disagg.handlers.strategies.router",
}

#: With both phases dispatched at once, instead of one after the other.
GENERATION_FIRST = {
    "prefill_first": "trtllm_disagg.handlers.strategies.prefill_first_together",
    "decode_first": "trtllm_disagg.handlers.strategies.decode_first_together",
}


class Builder(Protocol):
    """A strategy module's `build`: how a worker of this role answers. `client` calls the other stage."""

    def __call__(self, role: Role, engine: Engine, client: StageClient) -> Generate: ...


def build_generate(config: WorkerConfig, engine: Engine, client: StageClient) -> Generate:
    """How this worker answers a request."""
    name = "agg" if config.role is Role.AGG else config.strategy.value
    table = STRATEGIES if config.schedule_style is ScheduleStyle.CONTEXT_FIRST else GENERATION_FIRST
    build = cast(Builder, import_module(table[name]).build)
    return build(config.role, engine, client)
