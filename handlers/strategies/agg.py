"""agg: no disaggregation; one worker runs both phases."""

from trtllm_disagg.handlers.local import LocalAgg
from trtllm_disagg.handlers.services import StrategyParts
from trtllm_disagg.types import Generate


def build(parts: StrategyParts) -> Generate:
    return LocalAgg(parts.engine)
