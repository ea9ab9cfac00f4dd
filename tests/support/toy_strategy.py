"""A strategy outside the product: decode workers take requests and answer them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtllm_disagg.strategies import STRATEGIES, StrategySpec

if TYPE_CHECKING:
    from trtllm_disagg.handlers.services import StrategyParts
    from trtllm_disagg.types import Generate

TOY = StrategySpec(
    name="toy",
    roles=("prefill", "decode"),
    entry_role="decode",
    switchable=True,
    stop_order=("decode", "prefill"),
    builder="tests.support.toy_strategy:build",
)


def build(parts: StrategyParts) -> Generate:
    from trtllm_disagg.handlers.local import LocalAgg

    return LocalAgg(parts.engine)


def register() -> None:
    STRATEGIES[TOY.name] = TOY
