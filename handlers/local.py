"""The phases that run on this worker's own engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from trtllm_disagg.engine import Engine
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    InvalidRequestError,
    KvTransferError,
    PeerUnavailableError,
    RequestCancelledError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.ahead import newest_states
from trtllm_disagg.handlers.background import in_background
from trtllm_disagg.handlers.cancellation import abort_when_stopped
from trtllm_disagg.handlers.measured import tell_transfer
from trtllm_disagg.handlers.outputs import OutputCursor
from trtllm_disagg.types import (
    GenerateRequest,
    Handoff,
    PrefillResult,
    RequestContext,
    TokenChunk,
)
from trtllm_disagg.wire import encode_disaggregated_params, names_a_sender


class LocalPrefill:
    """context_only: the prompt's KV, and the first token."""

    def __init__(self, engine: Engine, *, sees_callers_max_tokens: bool = True) -> None:
        """Dynamo's router calls prefill with max_tokens 1; that says nothing about what the caller wants."""
        self._engine = engine
        self._sees_callers_max_tokens = sees_callers_max_tokens

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        result = self._engine.start_prefill(request)
        async with abort_when_stopped(result, context) as guard:
            with request_errors(self._engine):
                await result.aresult()
        handoff: Handoff | None = None
        try:
            if context.is_stopped():
                raise RequestCancelledError("the client left during prefill")
            handoff = self._handoff(request, result)
        finally:
            if handoff is None or handoff.is_final:
                guard.abort()  # no decode will fetch the KV
        return handoff

    def _handoff(self, request: GenerateRequest, result: Any) -> Handoff:
        chunk = OutputCursor(len(request.token_ids)).advance(result)
        if chunk is None or chunk.finish_reason == "cancelled":
            raise EngineError("the engine ended the prefill without a token")
        if chunk.finish_reason not in _ENDS_OF_EVERY_PREFILL:
            return Handoff(chunk, None)
        if self._sees_callers_max_tokens and request.stop.max_tokens == 1 and not request.goes_on:
            return Handoff(msgspec.structs.replace(chunk, finish_reason="length"), None)
        params = result.outputs[0].disaggregated_params
        encoded = encode_disaggregated_params(params) if params is not None else {}
        if not names_a_sender(encoded):
            raise EngineError("the engine finished the prefill without disaggregated_params")
        usage = chunk.completion_usage
        details = usage.prompt_tokens_details if usage is not None else None
        return Handoff(chunk.going_on(), PrefillResult(encoded, details), result.abort)


#: context_only ends like this after its one token; it says nothing about the answer.
_ENDS_OF_EVERY_PREFILL = ("length", "not_finished", None)


class LocalDecode:
    """generation_only: fetches the KV and goes on from the first token."""

    def __init__(self, engine: Engine, *, repeats_first_token: bool) -> None:
        """The engine's answer starts with prefill's token; say whether the client has to get it from here."""
        self._engine = engine
        self._skip = 0 if repeats_first_token else 1

    async def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        result = self._engine.start_decode(request)
        handoff.taken()
        prefill = request.prefill_result
        details = prefill.prompt_tokens_details if prefill is not None else None
        cursor = OutputCursor(
            len(request.token_ids),
            skip=self._skip,
            cached_tokens=details.cached_tokens if details is not None else None,
        )
        # With a rendezvous nothing may ever come, so nobody waits for it.
        deferred = request.rendezvous is None
        async with aclosing(
            _stream(self._engine, result, cursor, context, deferred_abort=deferred)
        ) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    tell_transfer(request.journey, result)
                yield chunk

    def drain(self, request: GenerateRequest) -> None:
        """Fetch and drop a handoff that nobody wants any more: that is how its sender's blocks come free.

        One token, in the background. It works the same on every engine, which a release message would not.
        """

        async def fetch() -> None:
            # Best effort: the lease ends by itself.
            with contextlib.suppress(self._engine.request_error, DisaggError):
                await self._engine.start_decode(request, max_tokens=1).aresult()

        in_background(fetch())


class LocalBoth:
    """context_and_generation: the whole answer here."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        result = self._engine.start_both(request)
        cursor = OutputCursor(len(request.token_ids))
        async with aclosing(_stream(self._engine, result, cursor, context, deferred_abort=False)) as chunks:
            async for chunk in chunks:
                yield chunk


async def _stream(
    engine: Engine, result: Any, cursor: OutputCursor, context: RequestContext, *, deferred_abort: bool
) -> AsyncGenerator[TokenChunk, None]:
    async with abort_when_stopped(result, context, deferred=deferred_abort) as guard:
        with request_errors(engine):
            async with aclosing(newest_states(result, guard.may_abort)) as states:
                async for state in states:
                    chunk = cursor.advance(state)
                    if chunk is not None:
                        yield chunk


@contextlib.contextmanager
def request_errors(engine: Engine) -> Iterator[None]:
    """The engine's per-request error -> ours, by whose fault it is."""
    try:
        yield
    except engine.request_error as error:
        if not engine.is_healthy:
            raise WorkerLeavingError(str(error)) from error
        raise _translate(error) from error


#: DisaggError.category, as the embedded engine reports it. TensorRT-LLM's errors have none: EngineError.
_BY_CATEGORY: dict[str, type[DisaggError]] = {
    InvalidRequestError.category: InvalidRequestError,
    PeerUnavailableError.category: KvTransferError,
}


def _translate(error: BaseException) -> DisaggError:
    return _BY_CATEGORY.get(getattr(error, "category", ""), EngineError)(str(error))
