"""What is read of an engine's RequestOutput: the new tokens, as fast as they come, and its times, as spans."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import CompletionOutput, RequestOutput
from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.handlers.trace import ENGINE_TIMES, timing_of
from trtllm_disagg.tracing.spans import Span
from trtllm_disagg.types import PROMPT_LOGPROBS, GenerateRequest, TokenChunk, Usage
from trtllm_disagg.wire.kv_handle import split_endpoint


class OutputCursor:
    """RequestOutput (cumulative) -> TokenChunks (new tokens), for one choice."""

    def __init__(
        self,
        num_prompt: int,
        *,
        skip: int = 0,
        cached_tokens: int | None = None,
        was_fetched: bool = False,
        choice: int | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """`skip`: number of tokens that the client has already. `cached_tokens`: replaces this engine's count, which
        after a KV transfer (`was_fetched`) may be the whole prompt. `choice`: of several ones, its index.
        `most_tokens`: what the answer's length is limited to. A decode of TensorRT-LLM makes two tokens where one is
        allowed.
        """
        self._num_prompt = num_prompt
        self._position = skip
        self._cached_tokens = cached_tokens
        self._was_fetched = was_fetched
        self._choice = choice or 0
        self._is_one_of_several = choice is not None
        self._most_tokens = most_tokens
        self._has_ended = False

    def advance(self, result: RequestOutput) -> Sequence[TokenChunk]:
        """The tokens since the last call, in one chunk or none. Raises StageTimeoutError."""
        output = result.outputs[self._choice]
        tokens = output.token_ids[self._position : self._most_tokens]
        reason = output.finish_reason
        if self._is_one_of_several:
            # TensorRT-LLM gives a finish reason to the choice that ends last, and to no other.
            if reason is None and result.finished:
                reason = "length" if len(output.token_ids) == self._most_tokens else "stop"
        elif reason == "stop" and self._most_tokens == 1:
            reason = "length"  # the second token would have been the end: it is none of the answer
        if self._has_ended or not (tokens or reason):
            return ()
        log_probs, top_logprobs = None, None
        if output.logprobs:
            entries = output.logprobs[self._position : self._position + len(tokens)]
            log_probs, top_logprobs = _logprobs(tokens, entries)
        chunk = TokenChunk(list(tokens), output.index, log_probs, top_logprobs)
        is_first = self._position == 0 and reason is None
        if is_first and (cached := self._cached(result, output)[0]) < self._num_prompt:
            # The frontend, which ends an answer at a stop string, has no last chunk then: it takes these from any.
            usage = Usage.of(self._num_prompt, len(tokens), cached)
            chunk = msgspec.structs.replace(chunk, completion_usage=usage)
        self._position += len(tokens)
        return (chunk,) if reason is None else (self._end(chunk, result, output, reason),)

    def _end(
        self, chunk: TokenChunk, result: RequestOutput, output: CompletionOutput, reason: str
    ) -> TokenChunk:
        if reason == "timeout":  # a finish reason that Dynamo's frontend does not know
            raise StageTimeoutError("the engine ran out of time for this request")
        self._has_ended = True
        cached, engine_data = self._cached(result, output)
        if (of_prompt := _prompt_logprobs(output)) is not None:
            engine_data[PROMPT_LOGPROBS] = of_prompt
        # Of all choices so far; the chunk of the last choice to end has the total.
        num_made = sum(len(each.token_ids[: self._most_tokens]) for each in result.outputs)
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
        # Only a count of the whole prompt includes what was fetched: an engine computes at least the last token.
        includes_fetched = self._was_fetched and counted == self._num_prompt
        if measured is None or not includes_fetched:
            return counted, {}
        total = measured.num_reused_blocks + measured.num_missed_blocks
        own = self._num_prompt * measured.num_reused_blocks // total if total else 0
        return min(own, max(self._num_prompt - 1, 0)), {
            "cached_tokens_engine_reported": result.cached_tokens or 0
        }


class ChoicesCursor:
    """An OutputCursor for a request with several choices: a chunk for each choice with new tokens."""

    def __init__(self, num_prompt: int, num_choices: int, most_tokens: int | None) -> None:
        """`most_tokens`: what the length of each answer is limited to."""
        self._cursors = [
            OutputCursor(num_prompt, choice=choice, most_tokens=most_tokens) for choice in range(num_choices)
        ]

    def advance(self, result: RequestOutput) -> Sequence[TokenChunk]:
        return [chunk for cursor in self._cursors for chunk in cursor.advance(result)]


def _logprobs(
    tokens: list[int], entries: list[Any]
) -> tuple[list[float] | None, list[list[dict[str, Any]]] | None]:
    """(logprob of each token, its alternatives) from the engine's entry for each token; (None, None) when an entry is
    missing: a shorter list would be read as the logprobs of other tokens.
    """
    if not tokens or len(entries) < len(tokens):
        return None, None
    if isinstance(entries[0], float):  # TensorRT-LLM, when the request asks for no alternatives
        return list(entries), None
    if not all(entries):
        return None, None
    # Some TensorRT-LLM versions omit the sampled token; like Dynamo's worker, use the likeliest one's logprob then.
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
    """The prompt's logprobs as Dynamo's frontend reads them; None when the engine has computed none."""
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


#: Cancels the task, which reads the result, when the engine can give no result any more.
Watch = Callable[[asyncio.Future[Any], RequestOutput], None]
#: Sets an event, now or soon.
Notify = Callable[[asyncio.Event], None]
at_once: Notify = asyncio.Event.set


#: So many turns of an idle loop take less than _IDLE_SECONDS.
_IDLE_TURNS, _IDLE_SECONDS = 16, 50e-6
#: For answers that go straight to a frontend, where each chunk costs more than its delay.
MANY_TURNS = 128


class FewTurnsLater:
    """A `Notify` that lets the event loop turn a few times, once for all answers. A busy loop does much in a turn, and
    the answers grow meanwhile: fewer chunks for all processes on their way. An idle one is not waited for.
    """

    def __init__(self, turns: int = 40, clock: Callable[[], float] = time.perf_counter) -> None:
        self._turns = turns
        self._clock = clock
        self._left = 0
        self._looked_at = 0.0
        self._waiting: set[asyncio.Event] = set()

    def __call__(self, event: asyncio.Event) -> None:
        if not self._waiting:
            self._left, self._looked_at = self._turns, self._clock()
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.add(event)

    def _turn(self) -> None:
        self._left -= 1
        if self._left > 0 and not (self._left % _IDLE_TURNS == 0 and self._is_idle()):
            asyncio.get_running_loop().call_soon(self._turn)
            return
        waiting, self._waiting = self._waiting, set()
        for event in waiting:
            event.set()

    def _is_idle(self) -> bool:
        since, self._looked_at = self._looked_at, self._clock()
        return self._looked_at - since < _IDLE_SECONDS


async def newest_states(
    result: RequestOutput, on_output: Callable[[], None], cancel_at_death: Watch, notify: Notify = at_once
) -> AsyncGenerator[RequestOutput, None]:
    """Yields `result` (cumulative) when it has grown: once for all outputs that came while the caller was busy, or
    until `notify` has set the event. A task reads the engine's outputs as they come, however slow the client is.

    `on_output` is called for each output, also while the caller is busy. Raises what iterating the result raises,
    after the last state, and CancelledError when `cancel_at_death` has cancelled the reading. The end of the reading
    waits for no `notify`.
    """
    has_grown = asyncio.Event()

    async def read() -> None:
        async for _ in result:
            on_output()
            if not has_grown.is_set():
                notify(has_grown)

    reader = asyncio.create_task(read(), name="read-ahead")
    # Not in the task itself: one that is cancelled before it begins runs no line of it.
    reader.add_done_callback(lambda _: has_grown.set())
    cancel_at_death(reader, result)
    try:
        has_ended = False
        while not has_ended:
            await has_grown.wait()
            has_grown.clear()
            has_ended = reader.done()
            yield result
        await reader
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reader


def record_engine(engine: Engine, request: GenerateRequest, result: RequestOutput) -> None:
    """Add the engine's times of a finished RequestOutput as spans below the request's span: waiting, KV transfer,
    computing. Without measurements nothing is added.
    """
    span = request.span
    if not span.is_recording:
        return
    timing = timing_of(result)
    if timing is None:
        return
    times = _Times(*(getattr(timing, name).total_seconds() * engine.time_scale for name in ENGINE_TIMES))
    if times.has_fetched:
        _record_transfer(span, times, timing.kv_cache_size, engine.kv_transport, _link(request))
    ready_at = max(times.arrival, times.fetched) if times.has_fetched else times.arrival
    if ready_at and times.scheduled:
        span.measured("engine_queue", ready_at, times.scheduled)
        span.note({"gen_ai.latency.time_in_queue": max(0.0, times.scheduled - ready_at)})
    computing_since = max(times.scheduled, ready_at)
    if computing_since and times.first_token > computing_since:
        if times.has_fetched:
            span.measured("first_decode_token", computing_since, times.first_token)
        else:
            _record_prompt(span, computing_since, times.first_token, result, engine.time_scale)
    if times.first_token and times.last_token > times.first_token:
        span.measured("decode_steps", times.first_token, times.last_token)
        span.note({"gen_ai.latency.time_in_model_decode": times.last_token - times.first_token})


class _Times(NamedTuple):
    """`ENGINE_TIMES` in seconds of one clock; 0: the request did not come that far."""

    arrival: float
    scheduled: float
    first_token: float
    last_token: float
    fetch_began: float
    fetched: float

    @property
    def has_fetched(self) -> bool:
        return self.fetched > self.fetch_began


def _record_transfer(
    span: Span, times: _Times, num_bytes: int, transport: str | None, link: str | None
) -> None:
    seconds = times.fetched - times.fetch_began
    notes = {
        "kv_transfer.bytes": num_bytes,
        "kv_transfer.gb_per_second": num_bytes / seconds / 1e9,
        "kv_transfer.transport": transport,
        "kv_transfer.link": link,
    }
    span.measured("kv_wait", times.arrival, times.fetch_began)
    span.measured("kv_transfer", times.fetch_began, times.fetched, notes)
    span.note({"gen_ai.latency.kv_cache_transfer_time": seconds})


def _record_prompt(span: Span, begin: float, end: float, result: RequestOutput, time_scale: float) -> None:
    """The span of the prompt's steps. The last of several has a span of its own: only it may complete the KV."""
    breakdown = getattr(result, "time_breakdown_metrics", None) or {}
    chunks = breakdown.get("ctx_chunk_metrics") or []
    compute = span.measured("compute", begin, end, {"chunks": len(chunks) or None})
    span.note({"gen_ai.latency.time_in_model_prefill": end - begin})
    last = chunks[-1] if len(chunks) > 1 else {}
    if "token_time" in last:
        # TensorRT-LLM takes these times from another clock than the others.
        seconds = (last["token_time"] - last["forward_start_time"]) * time_scale
        compute.measured("last_chunk", end - seconds, end)


_THIS_HOST = "this host"


def _link(request: GenerateRequest) -> str | None:
    """The host that the KV came from; None where the handoff does not name it."""
    rendezvous, handoff = request.rendezvous, request.prefill_result
    endpoint = rendezvous.ctx_info_endpoint if rendezvous is not None else None
    if handoff is not None:
        endpoint = handoff.disaggregated_params.get("ctx_info_endpoint")
    place = split_endpoint(str(endpoint))
    if place is None:
        return None
    host, _ = place
    return _THIS_HOST if host.startswith("/") else host
