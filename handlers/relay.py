"""A whole request that a worker of the other role answers, because it is to run in that worker's order."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from trtllm_disagg.errors import NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.pins import NEXT
from trtllm_disagg.handlers.remote import StageClient
from trtllm_disagg.types import Errand, Generate, GenerateRequest, RequestContext, TokenChunk
from trtllm_disagg.wire import decode_chunk, encode_request


def relayed(stage: StageClient, strategy: str) -> Generate:
    errand = Errand("whole", strategy)

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        if request.errand is not None:
            # Two workers without engines would send it to and fro.
            raise NoInstanceError("this request was relayed already")
        instance = await stage.pick(request)
        request.journey.facts["first_stage"] = f"{instance.instance_id:x}"
        has_ended = False
        raw = encode_request(request, errand)
        # A wish for an instance has been heard here; the other worker calls somebody else.
        raw["annotations"] = [each for each in request.annotations if not each.startswith(NEXT)]
        async with aclosing(instance.call(raw, context)) as answers:
            async for raw in answers:
                chunk = decode_chunk(raw)
                has_ended = chunk.finish_reason is not None
                yield chunk
        if not has_ended and not context.is_stopped():
            error = PeerUnavailableError("the other worker's answer stops without an end")
            error.peer = instance.instance_id
            raise error

    return generate
