"""What a worker answers with: its own engine, and the way to the workers of the other role."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_disagg.config.worker_config import Role, ScheduleStyle
from trtllm_disagg.engine import Engine
from trtllm_disagg.handlers.remote import StageClient
from trtllm_disagg.handoff_protocols import DYNAMO, HandoffProtocol


@dataclass(frozen=True, slots=True)
class Parts:
    role: Role
    engine: Engine
    stage: StageClient
    style: ScheduleStyle = ScheduleStyle.CONTEXT_FIRST
    #: Seconds for the phases that run here.
    prefill_timeout: float = 120.0
    first_decode_token_timeout: float = 60.0
    protocol: HandoffProtocol = DYNAMO
    #: The prefill queue, under --prefill-dispatch queue.
    prefills: StageClient | None = None

    @property
    def pushes(self) -> bool:
        """Both phases are dispatched at once, and prefill writes into decode's blocks."""
        return self.style is ScheduleStyle.GENERATION_FIRST
