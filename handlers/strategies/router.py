"""Dynamo's frontend chains prefill and decode itself (its PrefillRouter); no worker calls another."""

from collections.abc import AsyncGenerator

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.handlers.chain import bare_decode, bare_prefill
from trtllm_disagg.handlers.local import LocalBoth, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.remote import RemoteDrain
from trtllm_disagg.handlers.services import Parts
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


def build(parts: Parts) -> Generate:
    if parts.role is Role.PREFILL:
        # The decode workers answer whole requests, of which one with a handoff is a decode.
        drain = RemoteDrain(parts.stage)
        return bare_prefill(LocalPrefill(parts.engine, drain, sees_callers_max_tokens=False))
    decode = bare_decode(LocalDecode(parts.engine, repeats_first_token=True))
    return with_bypass(decode, LocalBoth(parts.engine))


def with_bypass(decode: Generate, both: Generate) -> Generate:
    """The router leaves prefill out when decode has most of the prompt (conditional disaggregation)."""

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        phase = both if request.prefill_result is None else decode
        return phase(request, context)

    return generate
