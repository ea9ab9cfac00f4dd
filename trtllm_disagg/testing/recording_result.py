"""What `recording_llm.LLM.generate_async` returns, and the script that it follows."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.testing.recording_types import (
    EOS_TOKEN,
    CompletionOutput,
    DisaggregatedParams,
    Logprob,
    RequestError,
    SamplingParams,
)

VOCAB_SIZE = 1000
_FIRST_ORDINARY_TOKEN = 3
_ENDPOINT = "tcp://prefill/"
_TRANSFER_ERROR = "Error in kv cache transfer for generation requests"


def scripted_token(prompt: Sequence[int], position: int, index: int = 0) -> int:
    """The token at a position of an answer: the same in every process, whatever ran before.

    As in a model it follows from the text before it: a prompt that ends with the start of an answer goes on with
    the rest of that answer.
    """
    answer, mixed = _answer_to(tuple(prompt), index)
    while len(answer) <= position:
        token = _FIRST_ORDINARY_TOKEN + mixed[0] % (VOCAB_SIZE - _FIRST_ORDINARY_TOKEN)
        answer.append(token)
        mixed[0] = _mixed(mixed[0], token)
    return answer[position]


@functools.lru_cache(maxsize=256)
def _answer_to(prompt: tuple[int, ...], index: int) -> tuple[list[int], list[int]]:
    """(tokens so far, what the next one follows from)."""
    return [], [functools.reduce(_mixed, prompt, index * 101)]


def _mixed(so_far: int, token: int) -> int:
    return (so_far * 31 + token * 7 + 1) % (1 << 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How one request goes. As it is: tokens of `scripted_token` up to max_tokens."""

    tokens: Sequence[int] | None = None
    """The whole answer, for every choice; it ends the request when it is used up."""
    error: Exception | None = None
    """Raised instead of the token at position `error_at`."""
    error_at: int = 0
    ends_with: str | None = None
    """The finish reason at the end, instead of `stop` or `length`."""
    perf_metrics: Any = None
    """What the engine has measured, for a request that asks for it."""
    gate: asyncio.Semaphore | None = None
    """One permit lets one token through, so a test can look at a request that is half done."""


class KvStore:
    """KV of finished prefills that wait for a decode: the prompt, by opaque state."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, list[int]] = {}
        self._names = itertools.count(1)

    def hold(self, prompt: list[int]) -> bytes:
        name = f"kv-{next(self._names)}".encode()
        self._prompts[name] = prompt
        return name

    def release(self, name: bytes) -> None:
        self._prompts.pop(name, None)

    def take(self, name: bytes | None, prompt: list[int]) -> None:
        """Move the KV to the decode side. Raises RequestError for KV that is gone, or of another prompt."""
        if name is None or self._prompts.pop(name, None) != prompt:
            raise RequestError(_TRANSFER_ERROR)

    def __len__(self) -> int:
        return len(self._prompts)

    def clear(self) -> None:
        self._prompts.clear()


_request_ids = itertools.count(1)


class RequestOutput:
    """One request. Iterating yields this same object, each time with one more token in it."""

    def __init__(
        self,
        *,
        prompt: str | None,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        disaggregated_params: DisaggregatedParams | None,
        streaming: bool,
        script: Script,
        kv_store: KvStore,
        python_transceiver: bool = False,
    ) -> None:
        self.request_id = next(_request_ids)
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(index=index) for index in range(sampling.n)]
        self.context_logits: Any = None
        self.cached_tokens = 0
        self.decoding_iter = 0
        self.metrics_dict: dict[str, Any] = {}
        self.disaggregated_params: DisaggregatedParams | None = None
        #: How many tokens were there at each abort.
        self.aborts: list[int] = []
        self._sampling = sampling
        self._given = disaggregated_params or DisaggregatedParams(request_type="context_and_generation")
        self._streaming = streaming
        self._script = script
        self._kv_store = kv_store
        self._python_transceiver = python_transceiver
        self._held: bytes | None = None
        self._has_failed = False
        self._steps = self._run()

    @property
    def finished(self) -> bool:
        return self._has_failed or all(output.finish_reason is not None for output in self.outputs)

    def abort(self) -> None:
        """End the request. On a finished context_only request: let go of the KV that it still holds.

        On a generation_only request before its first output: the KV stays where it is (Dynamo #7489).
        """
        self.aborts.append(self.outputs[0].length)
        if self._held is not None:
            self._kv_store.release(self._held)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        while True:
            # Another task gets its turn here, as it does while a real engine computes.
            await asyncio.sleep(0)
            if self._script.gate is not None and not self.is_aborted:
                await self._script.gate.acquire()
            self._advance()
            if self._streaming or self.finished:
                return self

    async def aresult(self) -> RequestOutput:
        async for _ in self:
            pass
        return self

    def result(self, timeout: float | None = None) -> RequestOutput:
        """The finished request, for code without an event loop."""
        while not self.finished:
            self._advance()
        return self

    @property
    def is_aborted(self) -> bool:
        return bool(self.aborts)

    @property
    def request_type(self) -> str:
        return self._given.request_type or "context_and_generation"

    # -- the script

    def _advance(self) -> None:
        try:
            next(self._steps)
        except Exception:
            self._has_failed = True
            raise

    @property
    def _max_tokens(self) -> int:
        # The LLM API does this to a context_only request, whatever the caller asked for.
        return 1 if self.request_type == "context_only" else self._sampling.max_tokens

    def _run(self) -> Iterator[None]:
        """One token of one choice a step."""
        if self.request_type == "generation_only" and not self.is_aborted:
            self._kv_store.take(_sender_of(self._given), self.prompt_token_ids)
            self.cached_tokens = len(self.prompt_token_ids)
        for position in itertools.count():
            for output in self.outputs:
                if output.finish_reason is None:
                    self._step(output, position)
                    yield

    def _step(self, output: CompletionOutput, position: int) -> None:
        self.decoding_iter = position + 1
        if self.is_aborted:
            output.finish_reason = "cancelled"
            return
        if self._script.error is not None and position >= self._script.error_at:
            raise self._script.error
        token = self._token(output.index, position)
        output.token_ids.append(token)
        self._add_logprobs(output, token, position)
        self._maybe_finish(output, token)
        if self.request_type == "context_only":
            self._hand_off(output, token)

    def _token(self, index: int, position: int) -> int:
        if position == 0 and self.request_type == "generation_only" and self._given.first_gen_tokens:
            return self._given.first_gen_tokens[0]
        if self._script.tokens is not None:
            return self._script.tokens[position]
        return scripted_token(self.prompt_token_ids, position, index)

    def _add_logprobs(self, output: CompletionOutput, token: int, position: int) -> None:
        if self._sampling.logprobs is None:
            return
        carried = self._given.first_gen_log_probs
        if position == 0 and self.request_type == "generation_only":
            # Only the prefill side has computed them.
            output.logprobs.append(dict(carried[0]) if carried else {})
            return
        count = max(self._sampling.logprobs, 1)
        others = ((token + offset) % VOCAB_SIZE for offset in range(count))
        output.logprobs.append({other: Logprob(-float(rank), rank) for rank, other in enumerate(others, 1)})
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) - 1.0

    def _maybe_finish(self, output: CompletionOutput, token: int) -> None:
        sampling = self._sampling
        end_token = EOS_TOKEN if sampling.end_id is None else sampling.end_id
        long_enough = output.length > (sampling.min_tokens or 0)
        if token in (sampling.stop_token_ids or ()) and not sampling.ignore_eos and long_enough:
            output.finish_reason, output.stop_reason = "stop", token
        elif token == end_token and not sampling.ignore_eos and long_enough:
            output.finish_reason = "stop"
        elif output.length >= self._max_tokens or output.length == len(self._script.tokens or range(0)):
            output.finish_reason = "length"
        if output.finish_reason is not None:
            output.finish_reason = self._script.ends_with or output.finish_reason
            output.request_perf_metrics = self._script.perf_metrics if sampling.return_perf_metrics else None
        if output.finish_reason == "stop" and not sampling.include_stop_str_in_output:
            # TensorRT-LLM never returns the token that has ended an answer.
            output.token_ids.pop()
            del output.logprobs[output.length :]

    def _hand_off(self, output: CompletionOutput, token: int) -> None:
        self._held = self._kv_store.hold(self.prompt_token_ids)
        given_id = self._given.disagg_request_id
        output.disaggregated_params = self.disaggregated_params = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=[token],
            first_gen_log_probs=list(output.logprobs) or None,
            ctx_request_id=self.request_id if given_id is None else given_id,
            disagg_request_id=given_id,
            opaque_state=None if self._python_transceiver else self._held,
            ctx_info_endpoint=[_ENDPOINT + self._held.decode()] if self._python_transceiver else None,
        )


def _sender_of(params: DisaggregatedParams) -> bytes | None:
    if params.ctx_info_endpoint:
        endpoint: str = params.ctx_info_endpoint[0]
        return endpoint.removeprefix(_ENDPOINT).encode()
    return params.opaque_state
