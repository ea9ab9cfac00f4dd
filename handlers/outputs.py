"""Turns an engine's RequestOutput into chunks of new tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from trtllm_disagg.engine.llm_api import CompletionOutput, RequestOutput
from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.types import PROMPT_LOGPROBS, TokenChunk, Usage


class OutputCursor:
    """Turns a cumulative RequestOutput into chunks of new tokens."""

    def __init__(
        self,
        num_prompt: int,
        *,
        skip: int = 0,
        cached_tokens: int | None = None,
        was_fetched: bool = False,
        max_new_tokens: int | None = None,
    ) -> None:
        """`skip`: the number of tokens that the client has. `cached_tokens` replaces this engine's count, which after a
        KV transfer (`was_fetched`) may be the whole prompt. `max_new_tokens`: the answer's maximum length, which
        matters since TensorRT-LLM's decode generates two tokens where one is allowed.
        """
        self._num_prompt = num_prompt
        self._position = skip
        self._cached_tokens = cached_tokens
        self._was_fetched = was_fetched
        self._max_new_tokens = max_new_tokens
        self._has_ended = False

    def advance(self, result: RequestOutput) -> Sequence[TokenChunk]:
        """The tokens since the last call, as one chunk or none. Raises StageTimeoutError."""
        output = result.outputs[0]
        tokens = output.token_ids[self._position : self._max_new_tokens]
        reason = output.finish_reason
        if reason == "stop" and self._max_new_tokens == 1:
            reason = "length"  # the second token is not part of the answer
        if self._has_ended or not (tokens or reason):
            return ()
        log_probs, top_logprobs = None, None
        if output.logprobs:
            entries = output.logprobs[self._position : self._position + len(tokens)]
            log_probs, top_logprobs = _logprobs(tokens, entries)
        chunk = TokenChunk(list(tokens), output.index, log_probs, top_logprobs)
        is_first = self._position == 0 and reason is None
        if is_first and (cached := self._cached(result, output)[0]) < self._num_prompt:
            # A frontend that ends an answer at a stop string sees no last chunk: it reads usage from any chunk.
            usage = Usage.of(self._num_prompt, len(tokens), cached)
            chunk = msgspec.structs.replace(chunk, completion_usage=usage)
        self._position += len(tokens)
        return (chunk,) if reason is None else (self._end(chunk, result, output, reason),)

    def _end(
        self, chunk: TokenChunk, result: RequestOutput, output: CompletionOutput, reason: str
    ) -> TokenChunk:
        if reason == "timeout":  # unknown to Dynamo's frontend
            raise StageTimeoutError("the engine ran out of time for this request")
        self._has_ended = True
        cached, engine_data = self._cached(result, output)
        if (of_prompt := _prompt_logprobs(output)) is not None:
            engine_data[PROMPT_LOGPROBS] = of_prompt
        num_made = len(output.token_ids[: self._max_new_tokens])
        return msgspec.structs.replace(
            chunk,
            finish_reason=reason,
            stop_reason=output.stop_reason if reason == "stop" else None,
            completion_usage=Usage.of(self._num_prompt, num_made, cached),
            engine_data=engine_data or None,
        )

    def _cached(self, result: RequestOutput, output: CompletionOutput) -> tuple[int, dict[str, Any]]:
        """(prompt tokens that no engine had to compute, `engine_data` with the engine's own count if it differs)."""
        if self._cached_tokens is not None:
            return self._cached_tokens, {}
        counted = min(result.cached_tokens or 0, self._num_prompt)
        measured = getattr(output.request_perf_metrics, "kv_cache_metrics", None)
        # Only a count of the whole prompt includes fetched tokens: an engine computes at least the last one.
        includes_fetched = self._was_fetched and counted == self._num_prompt
        if measured is None or not includes_fetched:
            return counted, {}
        total = measured.num_reused_blocks + measured.num_missed_blocks
        own = self._num_prompt * measured.num_reused_blocks // total if total else 0
        return min(own, max(self._num_prompt - 1, 0)), {
            "cached_tokens_engine_reported": result.cached_tokens or 0
        }


def _logprobs(
    tokens: list[int], entries: list[Any]
) -> tuple[list[float] | None, list[list[dict[str, Any]]] | None]:
    """(each token's logprob, its alternatives) from the engine's entry per token; (None, None) if an entry is missing,
    since a shorter list would match the wrong tokens.
    """
    if not tokens or len(entries) < len(tokens):
        return None, None
    if isinstance(entries[0], float):  # TensorRT-LLM without alternatives
        return list(entries), None
    if not all(entries):
        return None, None
    # Some TensorRT-LLM versions omit the sampled token: like Dynamo's worker, use the likeliest token's logprob.
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
    """As Dynamo's frontend reads them: entry i is of prompt token i, the first None. The engine's is of token i + 1."""
    if not output.prompt_logprobs:
        return None
    return [
        entry
        and {
            str(token): {"logprob": lp.logprob} | ({} if lp.rank is None else {"rank": lp.rank})
            for token, lp in entry.items()
        }
        for entry in (None, *output.prompt_logprobs[:-1])
    ]


#: Cancels the task that reads the result when the engine dies.
Watch = Callable[[asyncio.Future[Any], RequestOutput], None]
#: Sets an event, now or soon.
Notify = Callable[[asyncio.Event], None]
at_once: Notify = asyncio.Event.set


#: An idle loop makes this number of ticks in less than _IDLE_SECONDS.
_IDLE_TICKS, _IDLE_SECONDS = 16, 50e-6
#: Outputs further apart than this are engine steps: waiting would not put two into one chunk.
STEP_SECONDS = 2e-3


class FewTicksLater:
    """A `Notify` that waits a few ticks of the event loop, once for all answers. In a busy loop the answers grow
    meanwhile, so every process handles fewer chunks. In an idle loop it does not wait.
    """

    def __init__(self, ticks: int = 128, clock: Callable[[], float] = time.perf_counter) -> None:
        self._ticks = ticks
        self._clock = clock
        self._left = 0
        self._looked_at = 0.0
        self._waiting: set[asyncio.Event] = set()

    def __call__(self, event: asyncio.Event) -> None:
        if not self._waiting:
            self._left, self._looked_at = self._ticks, self._clock()
            self._soon = asyncio.get_running_loop().call_soon
            self._soon(self._tick)
        self._waiting.add(event)

    def _tick(self) -> None:
        self._left -= 1
        if self._left > 0 and not (self._left % _IDLE_TICKS == 0 and self._is_idle()):
            self._soon(self._tick)
            return
        waiting, self._waiting = self._waiting, set()
        for event in waiting:
            event.set()

    def _is_idle(self) -> bool:
        since, self._looked_at = self._looked_at, self._clock()
        return self._looked_at - since < _IDLE_SECONDS


async def newest_states(
    result: RequestOutput,
    on_first: Callable[[], None],
    cancel_at_death: Watch,
    notify: Notify = at_once,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncGenerator[RequestOutput, None]:
    """Yield `result` (cumulative) when it has grown, once for all outputs that came while the caller was busy or until
    `notify` set the event. A task reads the outputs as they come, even if the client is slow.

    The task calls `on_first` at the first output, even while the caller is busy. After the last state, raises what
    iterating the result raised; CancelledError if `cancel_at_death` cancelled the reading. The end, and an output a
    step after the previous one, do not wait for `notify`.
    """
    has_grown = asyncio.Event()
    is_notified = False

    async def read() -> None:
        nonlocal is_notified
        has_begun, came = False, clock()
        async for _ in result:
            if not has_begun:
                has_begun = True
                on_first()
            before, came = came, clock()
            if came - before > STEP_SECONDS:
                has_grown.set()
            elif not is_notified:
                is_notified = True
                notify(has_grown)

    reader = asyncio.create_task(read(), name="read-ahead")
    # Not in the task itself: a task cancelled before it begins runs no line.
    reader.add_done_callback(lambda _: has_grown.set())
    cancel_at_death(reader, result)
    try:
        has_ended = False
        while not has_ended:
            await has_grown.wait()
            has_grown.clear()
            is_notified = False
            has_ended = reader.done()
            yield result
        await reader
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reader
