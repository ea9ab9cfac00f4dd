"""An engine's RequestOutput, which is cumulative, as TokenChunks of what is new; read as fast as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from trtllm_disagg.engine.llm_api import CompletionOutput, RequestOutput
from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.types import PROMPT_LOGPROBS, TokenChunk, Usage


class OutputCursor:
    """RequestOutput (cumulative) -> TokenChunks (what is new), for one choice."""

    def __init__(
        self,
        num_prompt: int,
        *,
        skip: int = 0,
        cached_tokens: int | None = None,
        was_fetched: bool = False,
        choice: int = 0,
    ) -> None:
        """`skip` tokens have reached the client already; `cached_tokens` wins over this engine's count, which of KV
        that `was_fetched` has all of it. `choice` is a place in the result's `outputs`.
        """
        self._num_prompt = num_prompt
        self._position = skip
        self._cached_tokens = cached_tokens
        self._was_fetched = was_fetched
        self._choice = choice
        self._has_ended = False

    def advance(self, result: RequestOutput) -> Sequence[TokenChunk]:
        """What came since the last call, one chunk or none. Raises StageTimeoutError."""
        output = result.outputs[self._choice]
        tokens = output.token_ids[self._position :]
        if self._has_ended or not (tokens or output.finish_reason):
            return ()
        log_probs, top_logprobs = None, None
        if output.logprobs:
            entries = output.logprobs[self._position : self._position + len(tokens)]
            log_probs, top_logprobs = _logprobs(tokens, entries)
        self._position += len(tokens)
        chunk = TokenChunk(list(tokens), output.index, log_probs, top_logprobs)
        return (chunk,) if output.finish_reason is None else (self._end(chunk, result, output),)

    def _end(self, chunk: TokenChunk, result: RequestOutput, output: CompletionOutput) -> TokenChunk:
        if output.finish_reason == "timeout":  # Dynamo's frontend has no such end
            raise StageTimeoutError("the engine ran out of time for this request")
        self._has_ended = True
        cached, engine_data = self._cached(result, output)
        if (of_prompt := _prompt_logprobs(output)) is not None:
            engine_data[PROMPT_LOGPROBS] = of_prompt
        # What the other choices have so far; the last one to end has all.
        num_made = sum(len(each.token_ids) for each in result.outputs)
        return msgspec.structs.replace(
            chunk,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            completion_usage=Usage.of(self._num_prompt, num_made, cached),
            engine_data=engine_data or None,
        )

    def _cached(self, result: RequestOutput, output: CompletionOutput) -> tuple[int, dict[str, Any]]:
        """Tokens of the prompt that no engine had to compute, and what to tell of the engine's own count."""
        if self._cached_tokens is not None:
            return self._cached_tokens, {}
        counted = min(result.cached_tokens or 0, self._num_prompt)
        measured = getattr(output.request_perf_metrics, "kv_cache_metrics", None)
        if not self._was_fetched or measured is None:
            return counted, {}
        total = measured.num_reused_blocks + measured.num_missed_blocks
        own = self._num_prompt * measured.num_reused_blocks // total if total else 0
        return min(own, max(self._num_prompt - 1, 0)), {
            "cached_tokens_engine_reported": result.cached_tokens or 0
        }


class ChoicesCursor:
    """The same for a request with several choices: a chunk for each that has grown."""

    def __init__(self, num_prompt: int, num_choices: int) -> None:
        self._cursors = [OutputCursor(num_prompt, choice=choice) for choice in range(num_choices)]

    def advance(self, result: RequestOutput) -> Sequence[TokenChunk]:
        return [chunk for cursor in self._cursors for chunk in cursor.advance(result)]


def _logprobs(
    tokens: list[int], entries: list[Any]
) -> tuple[list[float] | None, list[list[dict[str, Any]]] | None]:
    """(of each token, of its alternatives), by the engine's entry for each token; None when one is missing: a shorter
    list would be read as the logprobs of other tokens.
    """
    if not tokens or len(entries) < len(tokens):
        return None, None
    if isinstance(entries[0], float):  # TensorRT-LLM, when the request asks for no alternatives
        return list(entries), None
    if not all(entries):
        return None, None
    # Some TensorRT-LLM leaves out the token that it has drawn; Dynamo's worker takes the likeliest one's instead.
    chosen = [
        (entry.get(token) or next(iter(entry.values()))).logprob
        for token, entry in zip(tokens, entries, strict=True)
    ]
    top = [
        [
            {"rank": lp.rank or 0, "token_id": token, "token": None, "logprob": lp.logprob}
            for token, lp in entry.items()
        ]
        for entry in entries
    ]
    return chosen, top


def _prompt_logprobs(output: CompletionOutput) -> list[dict[str, dict[str, Any]] | None] | None:
    """As Dynamo's frontend reads them; None when the engine has computed none."""
    if not output.prompt_logprobs:
        return None
    return [
        entry
        and {
            str(token): {"logprob": lp.logprob} | ({} if lp.rank is None else {"rank": lp.rank})
            for token, lp in entry.items()
        }
        for entry in output.prompt_logprobs
    ]


#: Inside, the task, which reads the result, is cancelled when what it waits for is gone.
AwaitedBy = Callable[[asyncio.Future[Any], RequestOutput], AbstractContextManager[None]]


def _as_long_as_it_takes(reading: asyncio.Future[Any], result: RequestOutput) -> AbstractContextManager[None]:
    return nullcontext()


async def newest_states(
    result: RequestOutput, on_output: Callable[[], None], awaited_by: AwaitedBy = _as_long_as_it_takes
) -> AsyncGenerator[RequestOutput, None]:
    """Reads an engine's output as fast as it comes, however slow the way to the client is: `result` (a RequestOutput,
    cumulative) when it has grown: once for all that came while the caller was busy. What
    comes alone never waits. Raises what iterating the result raises, behind the last state, and CancelledError when
    `awaited_by` has ended it.

    `on_output` is called for each output of the engine, also while the caller is busy.
    """
    news = asyncio.Event()

    async def read() -> None:
        try:
            async for _ in result:
                on_output()
                news.set()
        finally:
            news.set()

    reader = asyncio.create_task(read(), name="read-ahead")
    try:
        with awaited_by(reader, result):
            has_ended = False
            while not has_ended:
                await news.wait()
                news.clear()
                has_ended = reader.done()
                yield result
        await reader
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reader
