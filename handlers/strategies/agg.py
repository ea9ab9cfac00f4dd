"""No disaggregation: one worker does both phases."""

from trtllm_disagg.handlers.local import LocalBoth
from trtllm_disagg.handlers.services import Parts
from trtllm_disagg.types import Generate


def build(parts: Parts) -> Generate:
    return LocalBoth(parts.engine)
