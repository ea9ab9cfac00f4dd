"""The results of generate_async (RequestOutput, CompletionOutput, Logprob), and the table of running requests."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_disagg.engines.embedded.api.perf_metrics import (
    RequestPerfMetrics,
    metrics_dict,
    request_perf_metrics,
    time_breakdown,
)
from trtllm_disagg.engines.embedded.ipc.messages import LogprobEntry, MadeHandoff, TokenOutput
from trtllm_disagg.engines.embedded.params.request_params import DisaggregatedParams

Decode = Callable[[list[int]], str]

#: Tokens that stay unsettled. A UTF-8 character has at most four bytes and a token at least one, so later tokens
#: cannot change the text before them.
_OPEN = 4
#: After this many tokens even half a character is settled: a model may emit broken bytes for ever.
_TOO_MANY_OPEN = 64
_BROKEN = "\ufffd"


def decoder(tokenizer: Any, *, skip_special_tokens: bool) -> Decode:
    """transformers' `decode`, without its overhead where possible."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", True):
        backend: Decode = fast.decode
        return lambda ids: backend(ids, skip_special_tokens)  # type: ignore[call-arg]
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


class GrowingText:
    """The text of a growing answer, at a constant cost per token.

    `update` returns `decode` of all tokens; each list must continue the one before. Decodes only the tokens after
    the `_settled` ones, plus a few before them, since a token's text may depend on its neighbours.
    """

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._restart()

    def update(self, token_ids: list[int]) -> str:
        """Decodes the whole list if it was cut short (a stop word)."""
        if len(token_ids) < self._settled:
            self._restart()
        window = self.decode(self._context + token_ids[self._settled :])
        text = self._text + window[self._known :]
        # In steps, so that each end is tried at several lengths: both must fall between two characters.
        end = (len(token_ids) // _OPEN - 1) * _OPEN
        if end > self._settled:
            self._settle(token_ids[:end], window, is_late=end > self._settled + _TOO_MANY_OPEN)
        return text

    def _restart(self) -> None:
        #: Text of the settled tokens; its last `_known` characters are the text of `_context`.
        self._text = ""
        self._known = 0
        self._context: list[int] = []
        self._settled = 0

    def _settle(self, token_ids: list[int], window: str, *, is_late: bool) -> None:
        """Settle these tokens unless they end within a character; if late, always. (A run of bytes may look broken.)"""
        tokens = token_ids[self._settled :]
        text = self.decode(self._context + tokens)
        if is_late or (window.startswith(text) and not text.endswith(_BROKEN)):
            self._text += text[self._known :]
            self._settled = len(token_ids)
            # A context of hidden tokens only would make the next token the first, which loses its space.
            if known := len(self.decode(tokens)):
                self._context, self._known = tokens, known


class RequestError(RuntimeError):
    """This request failed; the engine continues. `category` is errors.DisaggError.category."""

    def __init__(self, message: str, category: str = "Internal") -> None:
        super().__init__(message)
        self.category = category


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `token_ids` and `logprobs` are cumulative: they only grow between two iterations."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any | None = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    _seen_tokens: int = 0
    _seen_logprobs: int = 0
    _seen_text: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._seen_tokens :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self._seen_logprobs :]

    @property
    def text_diff(self) -> str:
        return self.text[self._seen_text :]

    def _mark_seen(self) -> None:
        self._seen_tokens, self._seen_logprobs = len(self.token_ids), len(self.logprobs)
        self._seen_text = len(self.text)


#: One delivery of the receiver thread: token outputs of a step, or why the engine died.
Delivery = TokenOutput | RequestError


class RequestOutput:
    """A running request: iterate it (async or not), await `aresult()`, or `abort()` it."""

    def __init__(
        self,
        *,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        num_choices: int,
        streaming: bool,
        abort: Callable[[int], None],
        detokenize: Callable[[list[int]], str] | None = None,
        disagg_request_id: int | None = None,
        multimodal_hashes: list[list[int]] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(index=i) for i in range(num_choices)]
        self.context_logits: Any | None = None
        self.cached_tokens = 0
        self.decoding_iter = 0
        #: Constant: there is no speculative decoding.
        self.avg_decoded_tokens_per_iter = 1.0
        #: Seconds by MetricNames, when the request is measured (return_perf_metrics).
        self.metrics_dict: dict[Any, Any] = {}
        self.time_breakdown_metrics: dict[str, Any] | None = None
        self.finished = False
        self.disaggregated_params: DisaggregatedParams | None = None
        self._streaming = streaming
        self._abort = abort
        self._texts = [GrowingText(detokenize) for _ in range(num_choices)] if detokenize else []
        self._disagg_request_id = disagg_request_id
        self._multimodal_hashes = multimodal_hashes
        self._unfinished = num_choices
        #: Number of unfinished choices; the receiver thread counts it down.
        self.choices_left = num_choices
        #: The event loop of the request, woken after a delivery.
        self.loop = _running_loop()
        self.queue: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        #: Not an asyncio.Event: its Python code would run for every token.
        self._arrival: asyncio.Future[None] | None = None

    # -- on the receiver thread

    def deliver(self, delivery: Delivery) -> None:
        """Deliver outputs. Callable from any thread; blocked readers get them at once."""
        self.queue.put(delivery)

    def wake(self) -> None:
        """Runs in `loop` after a delivery."""
        if self._arrival is not None:
            if not self._arrival.done():
                self._arrival.set_result(None)
            self._arrival = None

    # -- on the caller's thread

    def abort(self) -> None:
        """Stop the request. KV of a context_only request that is still held for a decode is released."""
        self._abort(self.request_id)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        if self.loop is None:
            raise RuntimeError("this request was made outside of an event loop; iterate it synchronously")
        self._mark_seen()
        waiting = self.queue
        while True:
            # Only this task takes from it. Checking first is cheaper than catching queue.Empty for each token.
            while waiting.empty():
                # A delivery between these lines is not missed: `wake` runs in this loop, once we wait.
                if self._arrival is None or self._arrival.done():  # done: its reader was cancelled
                    self._arrival = self.loop.create_future()
                await self._arrival
            self._apply(waiting.get_nowait())
            if self.finished or (self._streaming and waiting.empty()):
                return self

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if self.finished:
            raise StopIteration
        self._mark_seen()
        self._apply(self.queue.get())
        while not self._streaming and not self.finished:
            self._apply(self.queue.get())
        return self

    async def aresult(self) -> RequestOutput:
        async for _ in self:
            pass
        return self

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Block until finished. Raises queue.Empty when no token came for `timeout` seconds."""
        while not self.finished:
            self._apply(self.queue.get(timeout=timeout))
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, outputs={self.outputs}, finished={self.finished})"
        )

    # -- growing the outputs

    def _mark_seen(self) -> None:
        for output in self.outputs:
            output._mark_seen()

    def _apply(self, delivery: Delivery) -> None:
        if isinstance(delivery, RequestError):
            self.finished = True
            raise delivery
        if delivery.error is not None:
            self.finished = True
            raise RequestError(delivery.error, delivery.error_category)
        output = self.outputs[delivery.index]
        output.token_ids.extend(delivery.token_ids)
        if delivery.trim:
            del output.token_ids[-delivery.trim :]
        for entry in delivery.logprobs or ():
            output.logprobs.append(_public(entry))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + _of_chosen(output.logprobs[-1])
        while len(output.logprobs) > len(output.token_ids):
            chosen = _of_chosen(output.logprobs.pop())
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) - chosen
        if delivery.prompt_logprobs:
            output.prompt_logprobs = [_public(entry) for entry in delivery.prompt_logprobs]
        self.cached_tokens = delivery.cached_tokens
        self.decoding_iter += delivery.num_steps
        if delivery.handoff is not None:
            self._hand_off(output, delivery.handoff)
        if delivery.finish_reason is not None:
            self._end(output, delivery)
        if self._texts:
            text = self._texts[delivery.index]
            if output.finish_reason is not None:
                # Decodes the whole answer, which is right for every tokenizer.
                output.text = text.decode(output.token_ids)
            elif self._streaming:
                # An incomplete character waits for its next token, or `text_diff` would miss it.
                shown = text.update(output.token_ids).rstrip(_BROKEN)
                # Text never shrinks, or `text_diff` would repeat it: some decoders show bytes as broken until they end.
                output.text = max(output.text, shown, key=len)

    def _hand_off(self, output: CompletionOutput, handoff: MadeHandoff) -> None:
        output.disaggregated_params = self.disaggregated_params = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=handoff.first_gen_tokens,
            first_gen_log_probs=list(output.logprobs) or None,
            ctx_request_id=self._ctx_request_id(handoff),
            disagg_request_id=self._disagg_request_id,
            # Empty with GENERATION_FIRST: decode has the KV.
            opaque_state=handoff.opaque_state or None,
            ctx_info_endpoint=handoff.ctx_info_endpoint or None,
            multimodal_hashes=self._multimodal_hashes,
        )

    def _end(self, output: CompletionOutput, last: TokenOutput) -> None:
        output.finish_reason, output.stop_reason = last.finish_reason, last.stop_reason
        self._unfinished -= 1
        self.finished = self._unfinished == 0
        if last.measured is None or last.finish_reason is None:
            return
        output.request_perf_metrics = request_perf_metrics(last.measured)
        self.time_breakdown_metrics = time_breakdown(last.measured)
        self.metrics_dict = metrics_dict(
            last.measured, last.finish_reason, output.length, only_choice=len(self.outputs) == 1
        )

    def _ctx_request_id(self, handoff: MadeHandoff) -> int:
        """Both phases use the caller's id, if there is one."""
        return handoff.ctx_request_id if self._disagg_request_id is None else self._disagg_request_id


#: TensorRT-LLM's base class of RequestOutput.
GenerationResult = RequestOutput


def _public(entry: LogprobEntry) -> dict[int, Logprob]:
    return {token: Logprob(logprob, rank) for token, logprob, rank in entry}


def _of_chosen(entry: dict[int, Logprob]) -> float:
    """0 for the empty entry of a first token without logprobs."""
    return next((each.logprob for each in entry.values()), 0.0)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def wake(results: Sequence[RequestOutput]) -> None:
    """Wake each event loop once for all its requests with new tokens."""
    for loop in {result.loop for result in results}:
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: no task waits there
                loop.call_soon_threadsafe(_wake_all, results, loop)


def _wake_all(results: Sequence[RequestOutput], loop: asyncio.AbstractEventLoop) -> None:
    for result in results:
        if result.loop is loop:
            result.wake()


class RunningRequests:
    """`add` and `fail_all` from any thread, `deliver` from the receiver thread."""

    def __init__(self) -> None:
        self._results: dict[int, RequestOutput] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._results)

    def add(self, result: RequestOutput) -> None:
        with self._lock:
            self._results[result.request_id] = result

    def deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Deliver the outputs to the running requests; drop finished streams."""
        delivered: list[RequestOutput] = []
        for output in outputs:
            if (result := self._results.get(output.request_id)) is None:
                continue
            if output.finish_reason is not None or output.error is not None:
                self._forget_when_done(result, output)
            result.deliver(output)
            delivered.append(result)
        wake(delivered)

    def fail_all(self, reason: str) -> None:
        """Fail all requests, because the engine has ended."""
        with self._lock:
            results, self._results = list(self._results.values()), {}
        for result in results:
            result.deliver(RequestError(reason, "Unavailable"))
        wake(results)

    def _forget_when_done(self, result: RequestOutput, output: TokenOutput) -> None:
        result.choices_left -= 1
        if result.choices_left == 0 or output.error is not None:
            self._results.pop(output.request_id, None)


class Feed:
    """Events or statistics for a caller that polls. Bounded: drops the oldest. One asyncio reader can await them."""

    def __init__(self, max_size: int | None) -> None:
        self._records: deque[dict[str, Any]] = deque(maxlen=max_size)
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def extend(self, records: Iterable[dict[str, Any]]) -> None:
        """Callable from any thread."""
        before = len(self._records)
        self._records.extend(records)
        waiter = self._waiter
        if waiter is not None and len(self._records) != before:
            loop, event = waiter
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(event.set)

    def take(self) -> list[dict[str, Any]]:
        return [self._records.popleft() for _ in range(len(self._records))]

    async def wait(self, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """The records so far; if none, those that arrive within `timeout` seconds. Unread records stay."""
        if not self._records and timeout:
            event = asyncio.Event()
            self._waiter = (asyncio.get_running_loop(), event)
            with contextlib.suppress(TimeoutError):
                if not self._records:  # a record may have come before the waiter was set
                    await asyncio.wait_for(event.wait(), timeout)
            self._waiter = None
        while self._records:
            yield self._records.popleft()
