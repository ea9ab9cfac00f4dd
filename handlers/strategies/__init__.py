"""One file a strategy, one line here: how a request is answered as a whole. Nobody else asks which one runs."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from trtllm_disagg.config.worker_config import Strategy
from trtllm_disagg.handlers.parts import Parts
from trtllm_disagg.types import Generate

STRATEGIES = {
    "agg": "trtllm_disagg.handlers.strategies.agg",
    "prefill_first": "trtllm_disagg.handlers.strategies.prefill_first",
    "decode_first": "trtllm_disagg.handlers.strategies.decode_first",
    "router": "trtllm_disagg.handlers.strategies.router",
}

#: Those in which one worker calls another.
ORDERS = (Strategy.PREFILL_FIRST, Strategy.DECODE_FIRST)


class Builder(Protocol):
    """A strategy module's `build`."""

    def __call__(self, parts: Parts) -> Generate: ...


def build_strategy(name: str, parts: Parts) -> Generate:
    build = cast(Builder, import_module(STRATEGIES[name]).build)
    return build(parts)
