"""router: Dynamo's frontend chains prefill and decode itself (its PrefillRouter); no worker calls another."""

from collections.abc import AsyncGenerator

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.handlers.chain import decode_service, prefill_service
from trtllm_disagg.handlers.local import LocalAgg, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.remote import RemoteDrain
from trtllm_disagg.handlers.services import StrategyParts
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


def build(parts: StrategyParts) -> Generate:
    if parts.role is Role.PREFILL:
        # A decode worker runs a drain like any request with a handoff: as a decode (`with_bypass`).
        drain = RemoteDrain(parts.stage)
        return prefill_service(LocalPrefill(parts.engine, drain, sees_callers_max_tokens=False))
    decode = decode_service(LocalDecode(parts.engine, repeats_first_token=True))
    return with_bypass(decode, LocalAgg(parts.engine))


def with_bypass(decode: Generate, agg: Generate) -> Generate:
    """`agg` for requests without a handoff: the router skips prefill when decode has most of the prompt cached."""

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        phase = agg if request.prefill_result is None else decode
        return phase(request, context)

    return generate
