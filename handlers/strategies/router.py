"""router: Dynamo's frontend chains prefill and decode itself (its PrefillRouter); no worker calls another."""

from collections.abc import AsyncGenerator

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.handlers.chain import PrefillService
from trtllm_disagg.handlers.local import LocalAgg, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.outputs import MANY_TURNS, FewTurnsLater
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.handlers.remote import RemoteDrain
from trtllm_disagg.handlers.services import StrategyParts
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


def build(parts: StrategyParts) -> Generate:
    if parts.config.role is Role.DECODE:
        return DecodeOrAgg(parts)
    # A decode worker runs a drain like any request with a handoff: as a decode.
    drain = RemoteDrain(parts.peers)
    prefill = LocalPrefill(parts.engine, drain, sees_callers_max_tokens=False)
    return PrefillService(prefill, Recalls(tuple, parts.engine.handoffs.lease_seconds))


class DecodeOrAgg:
    """The whole answer for requests without a handoff: the router skips prefill when decode has most of the prompt
    cached.
    """

    def __init__(self, parts: StrategyParts) -> None:
        self._decode = LocalDecode(parts.engine, repeats_first_token=True, notify=FewTurnsLater(MANY_TURNS))
        self._agg = LocalAgg(parts.engine, FewTurnsLater(MANY_TURNS))

    def __call__(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return (self._agg if request.prefill_result is None else self._decode)(request, context)
