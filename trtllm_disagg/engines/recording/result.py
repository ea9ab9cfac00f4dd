"""The result of `recording.LLM.generate_async`, its script, and the pace."""

from __future__ import annotations

import asyncio
import itertools
import threading
import zlib
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from trtllm_disagg.engines.embedded.api.result import CompletionOutput, Logprob
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.request_params import (
    DisaggregatedParams,
    DisaggScheduleStyle,
    SamplingParams,
)
from trtllm_disagg.engines.recording.hard_edges import HardEdges, RequestError
from trtllm_disagg.engines.recording.image_prompts import Images, InputProcessor
from trtllm_disagg.engines.recording.state import KvHolder, Meeting

#: `scripted_token` never makes it; put it into a script to end an answer.
EOS_TOKEN = 2
_MAX_POSITIONS = 1 << 20
_ENDPOINT = "tcp://prefill/"


#: Printable ASCII in a vocabulary of bytes, so that every token is text.
_FIRST_TOKEN, _NUM_TOKENS = 16, 64
_BYTES = [token.to_bytes(4, "little") for token in range(_FIRST_TOKEN + _NUM_TOKENS)]


def checksum(tokens: Sequence[int], index: int = 0) -> int:
    """Checksum of a prompt for the choice `index`, equal in every process."""
    return zlib.crc32(array("I", tokens), index * 101)


def token_after(checksum: int) -> int:
    """A prompt that ends with the start of an answer continues with the rest of that answer."""
    return _FIRST_TOKEN + checksum % _NUM_TOKENS


def extended(checksum: int, token: int) -> int:
    """The checksum after a token of `token_after`."""
    return zlib.crc32(_BYTES[token], checksum)


def scripted_token(prompt: Sequence[int], position: int, index: int = 0) -> int:
    """The token at a position of an answer."""
    return _Answer(prompt, index).token(position)


class _Answer:
    """An answer in which each token is a checksum of all before it."""

    __slots__ = ("_sum", "_tokens")

    def __init__(self, prompt: Sequence[int], index: int) -> None:
        self._sum = checksum(prompt, index)
        self._tokens: list[int] = []

    def token(self, position: int) -> int:
        return self.until(position + 1)[position]

    def until(self, length: int) -> list[int]:
        """At least `length` tokens."""
        while len(self._tokens) < length:
            self._tokens.append(token := token_after(self._sum))
            self._sum = extended(self._sum, token)
        return self._tokens


class Pace(BaseModel):
    """The key `recording` of the engine's arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Tokens ready at once, as if the engine's core were ahead of its reader.
    tokens_per_step: int = Field(1, ge=1)
    #: Seconds between steps; 0: as fast as the reader. A late reader gets all that is due.
    step_seconds: float = Field(0.0, ge=0)
    #: Tokens of each image.
    image_tokens: int = Field(16, ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The course of one request; by default, tokens of `scripted_token` up to max_tokens."""

    tokens: Sequence[int] | None = None
    """The whole answer, for every choice; its end ends the request."""
    error: Exception | None = None
    """Raised instead of the token at position `error_at`."""
    error_at: int = 0
    ends_with: str | None = None
    """Finish reason in place of `stop` or `length`."""
    prompt_logprobs: Sequence[Any] = ()
    """Only for a request that asks for them."""
    cached_tokens: int = 0
    """Cached prompt tokens, if no KV was fetched."""
    perf_metrics: Any = None
    """The engine's measurements, only for a request that asks for them."""
    time_breakdown_metrics: Mapping[str, Any] | None = None
    """The same for its steps."""
    gate: asyncio.Semaphore | None = None
    """Each permit lets one token through, so that a test can check an unfinished request."""


#: The default script.
AS_IT_IS = Script()


_request_ids = itertools.count(1)


@dataclass(slots=True)
class GenerationRequest:
    """The used part of TensorRT-LLM's request in this process (executor/request.py)."""

    prompt_token_ids: list[int]


class Serving(Protocol):
    """A request's view of its engine."""

    args: LlmArgs
    edges: HardEdges
    kv: KvHolder
    pace: Pace
    input_processor: InputProcessor
    #: Seconds that KV waits for decode; None: for ever.
    kv_seconds: float | None
    is_python_transceiver: bool
    #: The rank of all requests under attention DP, else None.
    dp_rank: int | None
    #: True for `--engine recording`: only a request's length options have an effect.
    is_engine: bool
    num_running: int = 0
    #: New requests wait in the engine's queue until they are aborted.
    is_full: bool = False
    #: Requests get no further answer, and no error.
    stands_still: bool = False
    fatal_error: BaseException | None = None
    #: Error of the response thread, raised with the next response.
    response_error: RequestError | None = None
    #: Setting it unblocks aborts on a dead engine.
    may_abort: threading.Event

    def num_cached(self, prompt: list[int], salt: str) -> int: ...
    def keep(self, tokens: list[int], salt: str, images: Images) -> None: ...
    def fetch(self, prompt: list[int], contents: list[int], salt: str) -> list[int]: ...
    def forget(self, ended: RequestOutput) -> None: ...
    def step_ended(self, ended: RequestOutput) -> None: ...
    def lose_responses(self, aborted: RequestOutput) -> None: ...


class RequestOutput:
    """One request. Iterating yields this object after each step."""

    def __init__(
        self,
        *,
        prompt: str | None,
        prompt_token_ids: list[int],
        images: Images,
        sampling: SamplingParams,
        disaggregated_params: DisaggregatedParams | None,
        streaming: bool,
        cache_salt: str,
        script: Script,
        engine: Serving,
    ) -> None:
        self.request_id = next(_request_ids)
        self.prompt = prompt
        self._generation_request = GenerationRequest(prompt_token_ids)
        self.outputs = [CompletionOutput(index=index) for index in range(sampling.n)]
        self.context_logits: Any = None
        self._images = images
        self._contents = engine.input_processor.contents(prompt_token_ids, images)
        self.cached_tokens = script.cached_tokens or engine.num_cached(self._contents, cache_salt)
        self.decoding_iter = 0
        self.metrics_dict: dict[str, Any] = {}
        self.time_breakdown_metrics: Mapping[str, Any] | None = None
        self.disaggregated_params: DisaggregatedParams | None = None
        #: Number of tokens at each abort.
        self.aborts: list[int] = []
        self._sampling = sampling
        self._given = disaggregated_params or DisaggregatedParams(request_type="context_and_generation")
        self._streaming = streaming
        self._script = script
        self._engine = engine
        self._cache_salt = cache_salt
        #: A step's responses are lost: the next token, or the rest of an aborted request.
        self.loses_step = False
        self._answers = [_Answer(self._contents, index) for index in range(sampling.n)]
        self._held: bytes | None = None
        self._meeting = self._rendezvous()
        #: Set once it has left the engine's queue.
        self._queued = asyncio.Event() if engine.is_full else None
        self._has_failed = False
        self._runs = True
        self._started: float | None = None
        self._num_steps = 0
        self._max_tokens = self._max_new_tokens()
        self._ignores_eos = sampling.ignore_eos or engine.is_engine
        #: Ended choices without a finish reason.
        self._untold: set[int] = set()
        self._steps = self._run()
        #: It has tokens only, so a whole step is made at once.
        self._is_plain = (
            script == AS_IT_IS
            and self._ignores_eos
            and sampling.logprobs is None
            and sampling.n == 1
            and not engine.edges.fails_others_at_aborted_prompts
            and self.request_type != "context_only"
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._generation_request.prompt_token_ids

    @property
    def finished(self) -> bool:
        if self._has_failed:
            return not self._engine.edges.never_finishes_after_error
        return not any(map(self._goes_on, self.outputs))

    def _goes_on(self, output: CompletionOutput) -> bool:
        return output.finish_reason is None and output.index not in self._untold

    def abort(self) -> None:
        """End the request. Without hard edges, a finished context_only request also frees its KV. A generation_only
        request before its first output leaves the KV where it is (Dynamo #7489).
        """
        if self._is_cut_off and not self.is_aborted:
            self._engine.lose_responses(self)
        self.aborts.append(self.outputs[0].length)
        if self._engine.edges.blocks_aborts_when_dead and self._engine.fatal_error is not None:
            self._engine.may_abort.wait()
        if self._held is not None and not self._engine.edges.keeps_kv_of_ended_requests:
            self._engine.kv.release(self._held)
        if self._meeting is not None:
            self._meeting.wanted.set()
            self._meeting.sent.set()
        if self._queued is not None and not self._engine.edges.forgets_aborted_in_queue:
            self._queued.set()
        self._leave()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        engine, gate = self._engine, self._script.gate
        while True:
            if self._queued is not None:
                await self._queued.wait()
            if self._meeting is not None:
                await self._meet(self._meeting)
            steps = 1
            if engine.pace.step_seconds and not self.aborts:
                steps = await self._steps_due(engine.pace.step_seconds)
            else:
                # Lets other tasks run, as while a real engine computes.
                await asyncio.sleep(0)
            if gate is not None and not self.aborts:
                await gate.acquire()
            is_lost = self.loses_step and self.is_aborted
            if is_lost or self._has_failed or engine.stands_still or engine.fatal_error is not None:
                await asyncio.get_running_loop().create_future()  # waits for ever
            self._advance(steps * engine.pace.tokens_per_step)
            if self._streaming or self.finished:
                return self

    async def aresult(self) -> RequestOutput:
        async for _ in self:
            pass
        return self

    def result(self, timeout: float | None = None) -> RequestOutput:
        """The finished request, for code without an event loop."""
        while not self.finished:
            self._advance(1)
        return self

    @property
    def is_aborted(self) -> bool:
        return bool(self.aborts)

    @property
    def _is_cut_off(self) -> bool:
        """True if an abort now ends it without the requested prompt logprobs."""
        is_due = self._sampling.prompt_logprobs is not None and not self.finished
        return is_due and self._engine.edges.fails_others_at_aborted_prompts and not self.outputs[0].length

    @property
    def request_type(self) -> str:
        return self._given.request_type or "context_and_generation"

    # -- GENERATION_FIRST

    def _rendezvous(self) -> Meeting | None:
        if self._given.schedule_style != DisaggScheduleStyle.GENERATION_FIRST:
            return None
        return self._engine.kv.meeting(self._given.disagg_request_id)

    async def _meet(self, meeting: Meeting) -> None:
        """Prefill waits for decode's blocks, decode for prefill's KV (disaggregated_params.py,
        _torch/pyexecutor/py_executor.py `DISAGG_CONTEXT_WAIT_SCHEDULER`).
        """
        if self.outputs[0].length:
            return
        if self.request_type == "context_only":
            await meeting.wanted.wait()
        else:
            meeting.wanted.set()
            await meeting.sent.wait()

    # -- the pace

    async def _steps_due(self, seconds: float) -> int:
        loop = asyncio.get_running_loop()
        if self._started is None:
            self._started = loop.time()
        await asyncio.sleep(max(0.0, self._started + (self._num_steps + 1) * seconds - loop.time()))
        due = max(1, int((loop.time() - self._started) / seconds) - self._num_steps)
        self._num_steps += due
        return due

    # -- the script

    def _advance(self, count: int) -> None:
        try:
            if self._is_plain and self.decoding_iter and not self.aborts:
                self._make(count)
                return
            for _ in range(count):
                next(self._steps)
                if self.finished:
                    self._leave()
                    return
        except Exception:
            self._has_failed = True
            self._leave()
            raise

    def _make(self, count: int) -> None:
        """Make `count` steps of a plain request at once, as `_step` would one by one."""
        output, start = self.outputs[0], self.decoding_iter
        end = self.decoding_iter = min(start + count, self._max_tokens)
        output.token_ids += self._answers[0].until(end)[start:end]
        if end == self._max_tokens:
            self._end(output, "length")
            self._leave()

    def _leave(self) -> None:
        if self._runs:
            self._runs = False
            if self.finished and not self._has_failed:  # the KV of the last token is never computed
                tokens = self._contents + self.outputs[0].token_ids[:-1]
                self._engine.keep(tokens, self._cache_salt, self._images)
            self._engine.num_running -= 1
            if self._queued is None or not self._engine.edges.forgets_aborted_in_queue:
                self._engine.forget(self)
            self._engine.step_ended(self)

    def _max_new_tokens(self) -> int:
        if self.request_type == "context_only":
            # The LLM API does this for every caller.
            return 1
        room = (self._engine.args.max_seq_len or _MAX_POSITIONS) - len(self.prompt_token_ids)
        limit = room if self._sampling.max_tokens is None else self._sampling.max_tokens
        overruns = self.request_type == "generation_only" and self._engine.edges.decodes_past_a_limit_of_one
        return max(2, limit) if overruns else limit

    def _run(self) -> Iterator[None]:
        """Each step makes one token of one choice."""
        self._check()
        if self.request_type == "generation_only" and not self.is_aborted and self._meeting is None:
            prompt = self.prompt_token_ids
            if sent := self._engine.kv.take(self._sender(), prompt):
                self._answers = [_Answer(self._engine.fetch(prompt, sent, self._cache_salt), 0)]
            self.cached_tokens = len(prompt)
        for position in itertools.count():
            for output in self.outputs:
                if self._goes_on(output):
                    self._step(output, position)
                    if self._engine.edges.reports_only_the_last_end and not self.finished:
                        self._forget_end(output)
                    yield

    def _forget_end(self, output: CompletionOutput) -> None:
        if output.finish_reason not in (None, "cancelled"):
            output.finish_reason = None
            self._untold.add(output.index)

    def _sender(self) -> bytes | None:
        engine, given = self._engine, self._given
        is_found_by_id = engine.edges.reports_only_ctx_request_id and engine.is_python_transceiver
        return None if is_found_by_id and given.disagg_request_id is None else _sender_of(given)

    def _check(self) -> None:
        """Raise errors that only the engine's process notices."""
        engine, length = self._engine, len(self.prompt_token_ids)
        longest = engine.args.max_seq_len
        if engine.edges.has_request_errors_for_length and longest is not None and length >= longest:
            room = f"`default_max_tokens` ({longest - length})"
            raise RequestError(
                f"{room} must be greater than 0, {room} = max_seq_len ({longest}) - "
                f"`splited_prompt_len` ({length}) - `query_token_len` (0)"
            )
        if self.request_type != "generation_only":
            return
        engine.input_processor.check_positions(self._given, self.prompt_token_ids)
        needs_rank = engine.edges.needs_ctx_dp_rank and engine.dp_rank is not None
        if needs_rank and self._given.ctx_dp_rank is None:
            raise RequestError(
                f"ctx_dp_rank is None for request {self.request_id}; "
                "disaggregated params may be missing context rank info"
            )

    def _step(self, output: CompletionOutput, position: int) -> None:
        self.decoding_iter = position + 1
        if self.is_aborted:
            output.finish_reason = "cancelled"
            return
        if (error := self._engine.response_error) is not None:
            self._engine.response_error = None
            raise error
        if self._script.error is not None and position >= self._script.error_at:
            raise self._script.error
        token = self._token(output.index, position)
        if self.loses_step:
            self.loses_step = False
            return
        output.token_ids.append(token)
        self._add_logprobs(output, token, position)
        self._maybe_finish(output, token)
        if self.request_type == "context_only" and output.finish_reason != "stop":
            self._hand_off(output, token)

    def _token(self, index: int, position: int) -> int:
        if position == 0 and self.request_type == "generation_only" and self._given.first_gen_tokens:
            return self._given.first_gen_tokens[0]
        if self._script.tokens is not None:
            return self._script.tokens[position]
        return self._answers[index].token(position)

    def _add_logprobs(self, output: CompletionOutput, token: int, position: int) -> None:
        if self._sampling.logprobs is None:
            return
        carried = self._given.first_gen_log_probs
        if position == 0 and self.request_type == "generation_only":
            # Only prefill has computed them.
            output.logprobs.append(dict(carried[0]) if carried else {})
            return
        count = max(self._sampling.logprobs, 1)
        others = range(token, token + count)
        output.logprobs.append({other: Logprob(-float(rank), rank) for rank, other in enumerate(others, 1)})
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) - 1.0

    def _maybe_finish(self, output: CompletionOutput, token: int) -> None:
        sampling = self._sampling
        end_token = EOS_TOKEN if sampling.end_id is None else sampling.end_id
        # TensorRT-LLM's sampler bans the end token until `min_tokens`, and checks stop words at every token.
        long_enough = output.length > (sampling.min_tokens or 0)
        if token in (sampling.stop_token_ids or ()) and not self._ignores_eos:
            output.finish_reason, output.stop_reason = "stop", token
        elif token == end_token and not self._ignores_eos and long_enough:
            output.finish_reason = "stop"
        elif output.length >= self._max_tokens or output.length == len(self._script.tokens or range(0)):
            output.finish_reason = "length"
        if output.finish_reason is not None:
            self._end(output, output.finish_reason)
        if output.finish_reason == "stop" and not sampling.include_stop_str_in_output:
            # TensorRT-LLM never returns the end token.
            output.token_ids.pop()
            del output.logprobs[output.length :]

    def _end(self, output: CompletionOutput, reason: str) -> None:
        if self._sampling.prompt_logprobs is not None:
            output.prompt_logprobs = list(self._script.prompt_logprobs) or self._logprobs_of_prompt()
        output.finish_reason = self._script.ends_with or reason
        measured = self._sampling.return_perf_metrics
        output.request_perf_metrics = self._script.perf_metrics if measured else None
        self.time_breakdown_metrics = self._script.time_breakdown_metrics if measured else None

    def _logprobs_of_prompt(self) -> list[dict[int, Logprob]]:
        """One entry per computed position: -p at position p, for the next token."""
        edges, prompt = self._engine.edges, self.prompt_token_ids
        skipped = 0
        if edges.counts_logprobs_behind_cached:
            skipped = self._engine.num_cached(self._contents, self._cache_salt)
        behind = [*prompt[1:], self.outputs[0].token_ids[0]]
        computed = range(skipped, len(prompt))
        return [{token: Logprob(-float(row), 1)} for row, token in zip(computed, behind, strict=False)]

    def _hand_off(self, output: CompletionOutput, token: int) -> None:
        engine, given_id = self._engine, self._given.disagg_request_id
        if self._meeting is not None:
            self._meeting.sent.set()
            return
        self._held = engine.kv.hold(self._contents, engine, engine.kv_seconds)
        hashes = [] if engine.edges.omits_image_hashes else [image.digest for image in self._images]
        endpoint = _ENDPOINT + self._held.decode()
        output.disaggregated_params = self.disaggregated_params = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=[] if engine.edges.omits_first_token_of_handoff else [token],
            first_gen_log_probs=list(output.logprobs) or None,
            ctx_request_id=self.request_id if given_id is None else given_id,
            disagg_request_id=None if engine.edges.reports_only_ctx_request_id else given_id,
            ctx_dp_rank=engine.dp_rank,
            opaque_state=None if engine.is_python_transceiver else self._held,
            ctx_info_endpoint=endpoint if engine.is_python_transceiver else None,
            multimodal_hashes=hashes or None,
            mrope_position_ids_handle=self._given.mrope_position_ids_handle,
            mrope_position_deltas_handle=self._given.mrope_position_deltas_handle,
        )


def _sender_of(params: DisaggregatedParams) -> bytes | None:
    endpoint = params.ctx_info_endpoint
    if endpoint:
        only = endpoint if isinstance(endpoint, str) else endpoint[0]
        return only.removeprefix(_ENDPOINT).encode()
    return params.opaque_state
