"""Prefills with an answer that never arrives: a client leaves as its prefill ends, and Dynamo drops what is on the way.

The prefill worker has answered, so it counts the KV as the caller's; the caller knows only that it asked. It recalls
the request by its id, and the prefill worker has the KV fetched as if it had not answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from trtllm_disagg.handlers.chain import bare_prefill
from trtllm_disagg.types import Generate, GenerateRequest, PrefillPhase, RequestContext, TokenChunk
from trtllm_disagg.wire.handoff_protocols import DYNAMO, HandoffProtocol

#: A recall is sent when the client leaves, and may overtake the answer that it is about.
_SECONDS = 5.0
_NOTHING: tuple[TokenChunk, ...] = ()


class Recalls:
    """What was answered, and what was recalled, a moment ago."""

    def __init__(self) -> None:
        self._answered: dict[str, Callable[[], None]] = {}
        self._recalled: set[str] = set()

    def answered(self, request_id: str | None, take_back: Callable[[], None]) -> None:
        if request_id is None:
            return
        if request_id in self._recalled:
            take_back()
            return
        self._answered[request_id] = take_back
        self._later(lambda: self._answered.pop(request_id, None))

    def recall(self, request_id: str) -> None:
        if (take_back := self._answered.pop(request_id, None)) is not None:
            take_back()
            return
        self._recalled.add(request_id)
        self._later(lambda: self._recalled.discard(request_id))

    def _later(self, forget: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(_SECONDS, forget)


def recallable(prefill: PrefillPhase, protocol: HandoffProtocol = DYNAMO) -> Generate:
    """The prefill phase as a service for decode workers."""
    recalls = Recalls()
    phase = bare_prefill(prefill, protocol, recalls.answered)

    async def recalled(request_id: str) -> AsyncGenerator[TokenChunk, None]:
        recalls.recall(request_id)
        for chunk in _NOTHING:
            yield chunk

    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        asked = request.phase_request
        if asked is not None and asked.stage == "recall":
            return recalled(asked.request or "")
        return phase(request, context)

    return generate
