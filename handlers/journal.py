"""One log line per request and worker: what was done for it here, and when. `trtllm-disagg demo` reads it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

log = logging.getLogger(__name__)


def journaled(generate: Generate, part: str) -> Generate:
    """`part` names the worker's role and strategy. Times are seconds since the epoch, so that logs of several
    processes on one machine can be put together.
    """

    async def recorded(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        started = time.time()
        times: list[float] = []
        num_tokens, finish_reason = 0, None
        try:
            async with aclosing(generate(request, context)) as chunks:
                async for chunk in chunks:
                    if len(times) < 2:
                        times.append(time.time())
                    num_tokens += len(chunk.token_ids)
                    finish_reason = chunk.finish_reason or finish_reason
                    yield chunk
        finally:
            entry = {
                "request": context.id(),
                "part": part,
                "prompt_tokens": len(request.token_ids),
                "tokens": num_tokens,
                "finish_reason": finish_reason,
                "start": started,
                "first_chunk": times[0] if times else None,
                "second_chunk": times[1] if len(times) > 1 else None,
                "end": time.time(),
            }
            log.info("%s%s", PREFIX, json.dumps(entry))

    return recorded


#: Starts every journal line's message.
PREFIX = "journal "
