"""The recording LLM without its cost: `--engine recording`. It makes NO real tokens and reads no weights.

A token is a function of the prompt and of the position, and comes at once or at a set pace, so what is measured
around it is the frontend's and the workers' own cost. Unlike `recording_llm` it serves real worker processes: no
KV exists, so a decode needs nothing but the handoff's words. `requests` keeps the newest requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from trtllm_disagg.testing import recording_llm
from trtllm_disagg.testing.recording_llm import (
    DEFAULT_REQUEST_PRIORITY,
    CompletionOutput,
    DisaggregatedParams,
    DisaggScheduleStyle,
    GuidedDecodingParams,
    Logprob,
    RequestError,
    SamplingParams,
    get_global_disagg_request_id,
)

__all__ = [
    "DEFAULT_REQUEST_PRIORITY",
    "LLM",
    "DisaggScheduleStyle",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "Logprob",
    "RequestError",
    "SamplingParams",
    "get_global_disagg_request_id",
]

#: Printable ASCII in a vocabulary of bytes (`bench.relay_model`): every token is text at once.
FIRST_TOKEN, NUM_TOKENS = 16, 64
_HELD = b"nothing: the recording engine has no KV"
_REQUESTS_KEPT = 256
_request_ids = itertools.count(1)


class Pace(BaseModel):
    """The key `recording` of the engine's arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: So many are ready at once, as where an engine's core is ahead of its reader.
    tokens_per_step: int = Field(1, ge=1)
    #: Between the steps; 0: as fast as they are read. A late reader finds all that is due.
    step_seconds: float = Field(0.0, ge=0)


class LLM(recording_llm.LLM):
    """Checks requests as the recording LLM does. Of a request's options only its length has an effect."""

    def __init__(self, model: str, recording: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        recording_llm.LLM.instances.remove(self)
        self._pace = Pace.model_validate(recording or {})
        self.requests: deque[tuple[list[int], SamplingParams]] = deque(maxlen=_REQUESTS_KEPT)
        self.num_active_requests = 0

    def generate_async(  # type: ignore[override]
        self,
        inputs: Sequence[int],
        sampling_params: SamplingParams,
        streaming: bool = False,
        disaggregated_params: DisaggregatedParams | None = None,
        cache_salt: str | None = None,
        priority: float = DEFAULT_REQUEST_PRIORITY,
    ) -> InstantOutput:
        if self.is_shut_down:
            raise RuntimeError("LLM is shutting down")
        if sampling_params.logprobs is not None:
            raise NotImplementedError("the recording engine has no log probabilities")
        prompt = list(inputs)
        self._check_request(prompt, sampling_params, disaggregated_params, priority)
        self.requests.append((prompt, sampling_params))
        return InstantOutput(self, prompt, sampling_params.max_tokens, disaggregated_params, self._pace)

    async def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """None ever come; the wait keeps the reader from spinning."""
        await asyncio.sleep(timeout or 0)
        nothing: tuple[dict[str, Any], ...] = ()
        for event in nothing:
            yield event

    get_stats_async = get_kv_cache_events_async


class InstantOutput:
    """One request; iterating yields this same object, each time with one more step's tokens in it."""

    def __init__(
        self,
        llm: LLM,
        prompt: list[int],
        max_tokens: int,
        given: DisaggregatedParams | None,
        pace: Pace,
    ) -> None:
        self.request_id = next(_request_ids)
        self.outputs = [CompletionOutput(index=0)]
        self.cached_tokens = 0
        self._llm = llm
        self._seed = sum(prompt)
        self._pace = pace
        self._given = given
        self._is_prefill = given is not None and given.request_type == "context_only"
        self._max_tokens = 1 if self._is_prefill else max_tokens
        self._started = asyncio.get_running_loop().time()
        self._steps = 0
        llm.num_active_requests += 1

    @property
    def finished(self) -> bool:
        return self.outputs[0].finish_reason is not None

    def abort(self) -> None:
        if not self.finished:
            self._finish("cancelled")

    def __aiter__(self) -> InstantOutput:
        return self

    async def __anext__(self) -> InstantOutput:
        if self.finished:
            raise StopAsyncIteration
        steps = await self._steps_due()
        if not self.finished:  # else aborted meanwhile
            self._make(steps * self._pace.tokens_per_step)
        return self

    async def aresult(self) -> InstantOutput:
        async for _ in self:
            pass
        return self

    async def _steps_due(self) -> int:
        seconds = self._pace.step_seconds
        if not seconds:
            # Another request gets its turn here, as it does while a real engine computes.
            await asyncio.sleep(0)
            return 1
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._started + (self._steps + 1) * seconds - loop.time()))
        due = max(1, int((loop.time() - self._started) / seconds) - self._steps)
        self._steps += due
        return due

    def _make(self, count: int) -> None:
        tokens = self.outputs[0].token_ids
        start = len(tokens)
        end = min(start + count, self._max_tokens)
        tokens.extend(instant_token(self._seed, position) for position in range(start, end))
        if end == self._max_tokens:
            self._hand_off()
            self._finish("length")

    def _finish(self, reason: str) -> None:
        self.outputs[0].finish_reason = reason
        self._llm.num_active_requests -= 1

    def _hand_off(self) -> None:
        if self._is_prefill and self._given is not None:
            self.outputs[0].disaggregated_params = DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=list(self.outputs[0].token_ids),
                ctx_request_id=self._given.disagg_request_id,
                disagg_request_id=self._given.disagg_request_id,
                opaque_state=_HELD,
            )


def instant_token(seed: int, position: int) -> int:
    """`seed` is the sum of the prompt: the same in every process, whatever ran before."""
    return FIRST_TOKEN + (seed * 31 + position * 7) % NUM_TOKENS
