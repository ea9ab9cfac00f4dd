"""For a WorkerDrain that counts requests and observes no chunk."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from trtllm_disagg.handlers.cancellation import OnChunk
from trtllm_disagg.types import GenerateRequest, RequestContext


def no_observer(request: GenerateRequest, context: RequestContext) -> AbstractContextManager[OnChunk]:
    return nullcontext(lambda chunk: chunk)
