"""The phases that run on a worker of the other role."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
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
    """Calls the other stage."""

    def call(self, request: dict[str, Any], context: RequestContext) -> AsyncGenerator[dict[str, Any], None]:
        """Its chunks, with the same request id, metadata and trace; a stopped context stops it too, and then
        the iteration just ends. Raises a DisaggError, whatever became of the peer.
        """
        ...

    async def pick(self) -> StageInstance:
        """One instance, to be called more than once. Raises a DisaggError when there is none."""
        ...


class StageInstance(Protocol):
    @property
    def description(self) -> dict[str, Any]:
        """What it says of itself (`pairing.describe_worker`)."""
        ...

    def call(self, request: dict[str, Any], context: RequestContext) -> AsyncGenerator[dict[str, Any], None]:
        """As StageClient.call."""
        ...


class NoStage:
    """The stage client of a worker that calls nobody."""

    def call(self, request: dict[str, Any], context: RequestContext) -> AsyncGenerator[dict[str, Any], None]:
        raise AssertionError("this worker has no second stage")

    async def pick(self) -> StageInstance:
        raise AssertionError("this worker has no second stage")


class RemotePrefill:
    def __init__(self, client: StageClient, drain: Callable[[GenerateRequest], None]) -> None:
        """`drain` lets a handoff's KV go when no decode was started: only a decode can tell its holder."""
        self._client = client
        self._drain = drain

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        handoffs: list[Handoff] = []
        with ExitStack() as unless_returned:
            async with aclosing(self._client.call(encode_request(request), context)) as answers:
                async for raw in answers:
                    handoffs.append(self._handoff(request, decode_chunk(raw)))
                    unless_returned.callback(handoffs[-1].release)
            if context.is_stopped():
                raise RequestCancelledError("the client left during remote prefill")
            if len(handoffs) != 1:
                raise PeerUnavailableError(f"the prefill worker sent {len(handoffs)} answers instead of one")
            unless_returned.pop_all()
            return handoffs[0]

    def _handoff(self, request: GenerateRequest, chunk: TokenChunk) -> Handoff:
        if chunk.disaggregated_params is None:
            if chunk.finish_reason is None:
                raise PeerUnavailableError("the prefill worker's answer is neither whole nor a handoff")
            return Handoff(chunk, None)
        if len(chunk.token_ids) != 1:
            raise PeerUnavailableError(
                f"the prefill worker sent {len(chunk.token_ids)} tokens instead of one"
            )
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
    ) -> AsyncGenerator[TokenChunk, None]:
        has_ended = False
        async with aclosing(self._client.call(encode_request(request), context)) as answers:
            async for raw in answers:
                # It answers, so it has the KV.
                handoff.taken()
                chunk = decode_chunk(raw)
                has_ended = chunk.finish_reason is not None
                yield chunk
        if not has_ended and not context.is_stopped():
            raise PeerUnavailableError("the decode worker's answer stops without an end")
