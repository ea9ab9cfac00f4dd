"""The nouns of a request's life, in the order in which it meets them. Imports only what is
recorded of them, `tracing.spans`.

The Structs are wire forms too: their field names are Dynamo's keys. Unknown keys
of a request are ignored here and forwarded as they came.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec

from trtllm_disagg.tracing.spans import NO_SPAN, Span


class StopConditions(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_visible: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    #: `nvext.max_thinking_tokens`.
    max_thinking_tokens: int | None = None


class SamplingOptions(msgspec.Struct, frozen=True):
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: dict[str, Any] | None = None


class OutputOptions(msgspec.Struct, frozen=True):
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    #: Stop tokens are returned too.
    no_stop_trim: bool | None = None


class Routing(msgspec.Struct, frozen=True):
    cache_salt: str | None = None
    dp_rank: int | None = None
    #: Pins of the second stage, as Dynamo's headers and `nvext` become.
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    cached_tokens: int | None = None


class PrefillResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the prefill phase gave: the engine's handle, and what the answer's usage needs to know."""

    disaggregated_params: dict[str, Any]
    prompt_tokens_details: PromptTokensDetails | None = None


#: Bounds of what the network says: a host name, a TCP port, a number of 63 bits, a block's index.
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Number63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class KvTransferParams(msgspec.Struct, frozen=True):
    """The two-phase protocol's word on a handoff, with vLLM's names; the last two are ours."""

    do_remote_decode: bool
    do_remote_prefill: bool
    remote_engine_id: Annotated[str, msgspec.Meta(max_length=128)] | None
    remote_block_ids: Annotated[list[BlockId], msgspec.Meta(max_length=1 << 20)] | None
    remote_host: Host | None
    remote_port: Port | None
    #: The engine's handle, as in PrefillResult.
    remote_handle: dict[str, Any] | None = None
    remote_cached_tokens: Number63 | None = None


class Rendezvous(msgspec.Struct, frozen=True, omit_defaults=True):
    """By what the two phases of a request find each other when both are dispatched at once."""

    disagg_request_id: int
    #: One endpoint; until 0.2.0 a list of one.
    ctx_info_endpoint: str | list[str]
    #: None: decode asks all ranks of attention DP.
    ctx_dp_rank: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ctx_info_endpoint, list):
            if len(self.ctx_info_endpoint) != 1:
                raise ValueError(f"ctx_info_endpoint: {len(self.ctx_info_endpoint)} endpoints; expected one")
            msgspec.structs.force_setattr(self, "ctx_info_endpoint", self.ctx_info_endpoint[0])


#: So many prefills are named at once.
MOST_ATTEMPTS = 1000
Attempts = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=MOST_ATTEMPTS)
]


class PhaseRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker wants of another; a request from a frontend has none, and means the whole answer."""

    stage: Literal["prefill", "decode", "whole", "recall", "taken"]
    #: For "whole": the order that the sender has chosen.
    strategy: str | None = None
    #: The name of this prefill; for "recall" and "taken", of those that they are about. A retry has another one.
    attempts: Attempts = ()
    #: For "prefill": the instance that asks.
    sender: int | None = None
    #: Of its earlier ones, those that its engine has been asked to fetch since it last said so.
    taken: Attempts = ()

    @property
    def is_notice(self) -> bool:
        """A word about prefills that this worker has answered: no work for an engine, and no request of a client."""
        return self.stage in ("recall", "taken")


class WireRequest(msgspec.Struct, frozen=True):
    """A request as Dynamo's frontend, or the first stage, sends it."""

    token_ids: list[int]
    stop_conditions: StopConditions | None = None
    sampling_options: SamplingOptions | None = None
    output_options: OutputOptions | None = None
    routing: Routing | None = None
    annotations: list[str] | None = None
    prefill_result: PrefillResult | None = None
    priority: float | None = None
    rendezvous: Rendezvous | None = None
    errand: PhaseRequest | None = None
    kv_transfer_params: KvTransferParams | None = None
    bootstrap_host: Host | None = None
    bootstrap_port: Port | None = None
    bootstrap_room: Number63 | None = None
    #: Of the span in which the first stage sends it.
    traceparent: Annotated[str, msgspec.Meta(max_length=128)] | None = None


@dataclass(slots=True)
class RequestTrace:
    """What was done for one request on one worker, and why: its log line, metrics and its answer have it."""

    #: What ran: prefill_first, decode_first, local (this worker did both phases), router or agg.
    strategy: str = ""
    #: Why that: "default", "annotation", or a decider's word.
    reason: str = ""
    #: One entry a fallback step: "other_instance: ...", "local: ...".
    fallbacks: list[str] = field(default_factory=list)
    #: The same for metrics: (where it went on, the name of the failure).
    steps: list[tuple[str, str]] = field(default_factory=list)
    #: Further facts that the answer tells: {"prefill_instance": "1a2b", ...}.
    facts: dict[str, Any] = field(default_factory=dict)
    #: What this worker's cache had of the prompt, for Dynamo's router; None where the engine does not tell.
    cache_hit: dict[str, int] | None = None
    #: When its engine did what for it, by the names of TensorRT-LLM's timing metrics, in seconds of the engine's clock;
    #: empty where requests are not measured (`--publish-metrics`).
    engine_times: dict[str, float] = field(default_factory=dict)
    #: Around all that this worker does for the request.
    root: Span = NO_SPAN
    #: What the engine measured of it: the `metrics_dict` of its last result here.
    measured: Mapping[Any, Any] = field(default_factory=dict)

    def chose(self, strategy: str, reason: str) -> None:
        """Later, lower decisions win: they are closer to what ran."""
        self.strategy, self.reason = strategy, reason

    def fell_back(self, to: str, because: object) -> None:
        """`because`: an error, or a sentence about a wish that could not be met."""
        self.fallbacks.append(f"{to}: {because}")
        self.steps.append((to, "wish" if isinstance(because, str) else type(because).__name__))

    def to_json(self) -> dict[str, Any]:
        """JSON; without what did not happen."""
        said: dict[str, Any] = {"strategy": self.strategy, "reason": self.reason, "fallbacks": self.fallbacks}
        return {name: value for name, value in said.items() if value} | self.facts


class GenerateRequest(msgspec.Struct, frozen=True):
    """A validated request. `raw` is how it came: the second stage gets that, unknown keys included.

    No wire form: a Struct because each step of its way makes a changed copy, which takes a dataclass 7 us.
    """

    raw: dict[str, Any]
    token_ids: list[int]
    stop: StopConditions
    sampling: SamplingOptions
    output: OutputOptions
    cache_salt: str | None
    priority: float | None
    annotations: tuple[str, ...]
    prefill_result: PrefillResult | None = None
    rendezvous: Rendezvous | None = None
    phase_request: PhaseRequest | None = None
    #: By role, the instance of the other stage that the caller wants.
    pins: dict[str, int | None] = msgspec.field(default_factory=dict)
    #: The rank of attention DP that a router has chosen on this worker.
    dp_rank: int | None = None
    #: The conversation that it belongs to.
    session_id: str | None = None
    #: Of the span around it, for the engine's own spans.
    trace_headers: dict[str, str] | None = None
    #: The same of the worker that sent it.
    traceparent: str | None = None
    #: A decode comes after this prefill, whatever `stop.max_tokens` says.
    decode_follows: bool = False
    #: Instances that failed this request already.
    avoid: frozenset[int] = frozenset()
    trace: RequestTrace = msgspec.field(default_factory=RequestTrace)
    #: What is done for it now, of which what is done next is a part.
    step: Span = NO_SPAN

    @property
    def num_choices(self) -> int:
        return self.sampling.n or 1

    @property
    def computes_prompt(self) -> bool:
        """False for a decode. TensorRT-LLM fails one that asks for logprobs of the prompt (`base_worker.py`)."""
        return self.prefill_result is None

    @property
    def span(self) -> Span:
        return self.step if self.step.is_recording else self.trace.root

    def within(self, span: Span) -> GenerateRequest:
        return msgspec.structs.replace(self, step=span) if span.is_recording else self

    def avoiding(self, instance_id: int) -> GenerateRequest:
        return msgspec.structs.replace(self, avoid=self.avoid | {instance_id})

    def with_rendezvous(self, rendezvous: Rendezvous) -> GenerateRequest:
        return msgspec.structs.replace(self, rendezvous=rendezvous)

    def with_handoff(self, handoff: Handoff) -> GenerateRequest:
        return msgspec.structs.replace(self, prefill_result=handoff.result)


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        return cls(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens),
        )


#: Of `engine_data`, as Dynamo's frontend reads it.
PROMPT_LOGPROBS = "prompt_logprobs"


class TokenChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens on their way to the client; the last one has finish_reason and usage."""

    token_ids: list[int]
    index: int = 0
    log_probs: list[float] | None = None
    #: For each token its alternatives, the chosen one among them: {rank, token_id, token, logprob}.
    top_logprobs: list[list[dict[str, Any]]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_usage: Usage | None = None
    disaggregated_params: dict[str, Any] | None = None
    engine_data: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    #: Dynamo gives it to the worker that goes on with this answer when this one dies (`handlers/migration.py`).
    worker_trace_link: dict[str, str] | None = None

    @property
    def of_prompt(self) -> dict[str, Any] | None:
        """Of `engine_data`, what only the engine that computed the prompt can tell."""
        of_prompt = (self.engine_data or {}).get(PROMPT_LOGPROBS)
        return None if of_prompt is None else {PROMPT_LOGPROBS: of_prompt}

    def without_end(self) -> TokenChunk:
        """The same tokens without the end that every prefill phase has."""
        return TokenChunk(self.token_ids, self.index, self.log_probs, self.top_logprobs)


@dataclass(slots=True)
class Handoff:
    """The end of the prefill phase: the whole answer (`is_final`), or the first token and a way to go on."""

    first: TokenChunk
    result: PrefillResult | None
    #: Lets the prefill side's KV go when no decode will fetch it; never waits.
    _release: Callable[[], None] | None = field(default=None)
    #: Tells the prefill side that its KV is read by no worker any more.
    _ended: Callable[[], None] | None = field(default=None)
    #: A decode worker was called with it: it may have begun to fetch the KV.
    is_asked_for: bool = False
    #: For the `engine_data` of the answer's last chunk.
    of_prompt: dict[str, Any] | None = None

    @property
    def is_final(self) -> bool:
        return self.result is None

    def as_chunk(self, num_prompt: int) -> TokenChunk:
        """How a prefill worker answers another process; Dynamo's own PrefillRouter reads the same keys."""
        if self.result is None:
            return self.first
        details = self.result.prompt_tokens_details or PromptTokensDetails(0)
        return msgspec.structs.replace(
            self.first,
            finish_reason="length",
            completion_usage=Usage.of(num_prompt, len(self.first.token_ids), details.cached_tokens or 0),
            disaggregated_params=self.result.disaggregated_params,
            engine_data=self.of_prompt,
        )

    def taken(self) -> None:
        """Decode has the KV."""
        self._release = None
        self._end()

    def passed_on(self) -> Callable[[], None]:
        """Another worker has the duty to fetch or release the KV, which is still here. What is returned takes that
        back, and releases it.
        """
        release, self._release = self._release, None

        def take_back() -> None:
            self._release = release
            self.release()

        return take_back

    def on_release(self, release: Callable[[], None]) -> None:
        self._release = release

    def release(self) -> None:
        """Idempotent; nothing happens after `taken` or `passed_on`."""
        release, self._release = self._release, None
        if release is not None:
            release()
            self._end()

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


class RequestContext(Protocol):
    """What handlers use of Dynamo's Context."""

    def id(self) -> str | None: ...

    def is_stopped(self) -> bool: ...

    async def async_killed_or_stopped(self) -> Any: ...


class PrefillPhase(Protocol):
    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        """context_only. Raises a DisaggError; RequestCancelledError when the client left meanwhile."""
        ...


class DecodePhase(Protocol):
    def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        """generation_only. Ends early, without an error, when the client left; closing it ends it too."""
        ...


#: A worker's whole service: one request in, chunks out. Its reader closes it, at once and not by the
#: garbage collector: that is when an engine hears that its tokens are not wanted any more.
Generate = Callable[[GenerateRequest, RequestContext], AsyncGenerator[TokenChunk, None]]
