"""A request whose answer is complete but for its end.

A worker died when it had given the last token and not yet said so; the frontend migrates the request, with the tokens
that it has as prompt and what is left of `max_tokens`: 0.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from trtllm_disagg.handlers.resume import has_ended, the_end
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


def ending_what_is_complete(generate: Generate) -> Generate:
    def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        if has_ended(request, []):
            request.journey.chose("local", "nothing_left")
            return _end(request)
        return generate(request, context)

    return answer


async def _end(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
    yield the_end(request, [])
