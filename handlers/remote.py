"""The phases that run on a worker of the other role."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from trtllm_disagg.errors import PeerUnavailableError, RequestCancelledError
from trtllm_disagg.types import (
    GenerateRequest,
    Handoff,
    PrefillResult,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire import decode_chunk, encode_request


class StageClient(Protocol):
    """Calls one instance of the other stage."""

    def call(self, request: dict[str, Any], context: RequestContext) -> AsyncIterator[dict[str, Any]]:
        """Its chunks, with the same request id, metadata and trace; a stopped context stops it too, and then the
        iteration just ends. Raises a DisaggError, whatever became of the peer.
        """
        ...


class RemotePrefill:
    def __init__(self, client: StageClient, drain: Callable[[GenerateRequest], None]) -> None:
        """`drain` lets a handoff's KV go when no decode was started: only a decode can tell its holder."""
        self._client = client
        self._drain = drain

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        chunks = [decode_chunk(raw) async for raw in self._client.call(encode_request(request), context)]
        if not chunks and context.is_stopped():
            raise RequestCancelledError("the client left during remote prefill")
        if len(chunks) != 1:
            raise PeerUnavailableError(f"the prefill worker sent {len(chunks)} answers instead of one")
        (chunk,) = chunks
        if chunk.disaggregated_params is None:
            return Handoff(chunk, None)
        usage = chunk.completion_usage
        details = usage.prompt_tokens_details if usage is not None else None
        handoff = Handoff(chunk.going_on(), PrefillResult(chunk.disaggregated_params, details))
        with_kv = request.with_handoff(handoff)
        handoff.on_release(lambda: self._drain(with_kv))
        return handoff


class RemoteDecode:
    def __init__(self, client: StageClient) -> None:
        self._client = client

    async def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncIterator[TokenChunk]:
        async for raw in self._client.call(encode_request(request), context):
            # It answers, so it has the KV.
            handoff.taken()
            yield decode_chunk(raw)
