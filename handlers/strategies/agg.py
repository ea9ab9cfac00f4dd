"""No disaggregation: one worker does both phases."""

from trtllm_disagg.config import Role
from trtllm_disagg.engine import Engine
from trtllm_disagg.handlers.local import LocalBoth
from trtllm_disagg.handlers.remote import StageClient
from trtllm_disagg.types import Generate


def build(role: Role, engine: Engine, client: StageClient) -> Generate:
    return LocalBoth(engine)
