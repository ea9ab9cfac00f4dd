"""The types that a request passes through, in that order. The Structs are wire forms too: their encoded field names are
Dynamo's keys. Unknown keys of a request are ignored here and forwarded as they came.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from trtllm_disagg.tracing.spans import NO_SPAN, Span


class StopConditions(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_visible: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    #: `nvext.max_thinking_tokens`.
    max_thinking_tokens: int | None = None


class SamplingOptions(msgspec.Struct, frozen=True):
    n: int | None = None
    best_of: int | None = None
    presence_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    repetition_penalty: Float32 | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    top_k: int | None = None
    min_p: Float32 | None = None
    use_beam_search: bool | None = None
    length_penalty: Float32 | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: dict[str, Any] | None = None

    @property
    def is_guided(self) -> bool:
        # An empty schema is valid, too: it allows any JSON.
        return self.guided_decoding is not None and any(
            guide not in (None, False, "", []) for guide in self.guided_decoding.values()
        )


class OutputOptions(msgspec.Struct, frozen=True):
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    #: True: stop tokens are returned to the client too.
    no_stop_trim: bool | None = None


class Routing(msgspec.Struct, frozen=True):
    cache_salt: str | None = None
    #: Dynamo has it in 32 bits.
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None = None
    #: Pins of the second stage; Dynamo's frontend reads them from headers and `nvext`.
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None
    #: `nvext.agent_hints.priority`: any number, higher ones first; 0 is that of requests without one.
    priority: int | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    cached_tokens: int | None = None


class PrefillResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The prefill phase's result: the engine's handle, and the counts that the answer's usage needs."""

    disaggregated_params: dict[str, Any]
    prompt_tokens_details: PromptTokensDetails | None = None


#: Bounds of values from the network: a host name, a TCP port, a number of 63 bits, a token or a rank, a block's index,
#: and Dynamo's numbers, neither infinite nor NaN.
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Number63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Float32 = Annotated[float, msgspec.Meta(ge=-3.5e38, le=3.5e38)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class KvTransferParams(msgspec.Struct, frozen=True):
    """A handoff in the two-phase protocol, with vLLM's names; the last two are this project's."""

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
    """Where decode finds the prefill engine when both phases of a request are dispatched at once."""

    disagg_request_id: Number63
    #: The prefill engine's endpoint; until 0.2.0 a list with one endpoint.
    ctx_info_endpoint: str | list[str]
    #: The prefill engine's rank of attention DP; None: decode asks all ranks.
    ctx_dp_rank: Int32 | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "ctx_info_endpoint", one_endpoint(self.ctx_info_endpoint))


def one_endpoint(given: str | list[str]) -> str:
    """The endpoint, given alone or in a list. Raise ValueError for a list of none or several."""
    if isinstance(given, str):
        return given
    if len(given) != 1:
        raise ValueError(f"ctx_info_endpoint: {len(given)} endpoints; expected one")
    return given[0]


#: As engines have it, in 32 bits.
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

#: A message names at most this many prefills.
MOST_ATTEMPTS = 1000
Attempts = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=MOST_ATTEMPTS)
]


class PhaseRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker asks of another. A request from a frontend has none: it asks for the whole answer."""

    kind: Literal["prefill", "decode", "cached", "whole", "recall", "taken"] = msgspec.field(name="stage")
    #: For "whole": the order that the sender has chosen.
    strategy: str | None = None
    #: The id of this prefill attempt (a retry has another id); for "recall" and "taken": the attempts concerned.
    attempts: Attempts = ()
    #: For "prefill": the instance that asks.
    sender: int | None = None
    #: For "prefill": earlier attempts, not reported before, with KV that the sender's engine has begun to fetch.
    taken: Attempts = ()
    #: For "whole": the decode worker that sends it because its batch is full. It decodes it only if no other one can.
    full: int | None = None

    @property
    def is_notice(self) -> bool:
        """A notice is about prefills that this worker has answered: no engine works on it, no client waits for it."""
        return self.kind in ("recall", "taken")


class Migrated(NamedTuple):
    #: The tokens that the client has.
    delivered: list[int]
    #: The seed that an earlier worker drew; 0: the request has its own.
    seed: int


class WireRequest(msgspec.Struct, frozen=True):
    """A request as Dynamo's frontend, or the first stage, sends it."""

    token_ids: list[TokenId]
    stop_conditions: StopConditions | None = None
    sampling_options: SamplingOptions | None = None
    output_options: OutputOptions | None = None
    routing: Routing | None = None
    annotations: list[str] | None = None
    prefill_result: PrefillResult | None = None
    priority: Float32 | None = None
    rendezvous: Rendezvous | None = None
    phase_request: PhaseRequest | None = msgspec.field(name="errand", default=None)
    kv_transfer_params: KvTransferParams | None = None
    bootstrap_host: Host | None = None
    bootstrap_port: Port | None = None
    bootstrap_room: Number63 | None = None
    #: W3C id of the span in which the first stage sends the request.
    traceparent: Annotated[str, msgspec.Meta(max_length=128)] | None = None


class InProgress:
    """Counts what has begun and not ended: `with` blocks, or `enter` until its result is called."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1

    def enter(self) -> Callable[[], None]:
        self.count += 1
        return self.__exit__


class Fallback(StrEnum):
    """The fallback steps: how a request is continued after a failure, as logs, metrics and answers name it."""

    OTHER_INSTANCE = "other_instance"  # also names the first try, and any instance in place of a pinned one
    LOCAL = "local"  # this worker alone
    OTHER_STAGE = "other_stage"  # a worker of the other role answers the whole request
    DIRECT = "direct"  # a prefill worker, without the prefill queue


@dataclass(slots=True)
class RequestTrace:
    """What was done for one request on one worker, and why; for its log line, its answer and metrics."""

    #: What ran: prefill_first, decode_first, local (this worker did both phases), router or agg.
    strategy: str = ""
    #: Why that strategy ran: "default", "annotation", or a decider's reason.
    reason: str = ""
    #: One entry for each fallback step: "other_instance: ...", "local: ...".
    fallbacks: list[str] = field(default_factory=list)
    #: The same for metrics: (the `Fallback`, the class name of the failure).
    steps: list[tuple[str, str]] = field(default_factory=list)
    #: Further facts for the answer: {"prefill_instance": "1a2b", ...}.
    facts: dict[str, Any] = field(default_factory=dict)
    #: Tokens of the prompt, and those found in this worker's cache, for Dynamo's router; None: the engine counts none.
    cache_hit: dict[str, int] | None = None
    #: TensorRT-LLM's timing metrics of the request by name, in seconds of the engine's clock; empty where requests
    #: are not measured (`--publish-metrics`).
    engine_times: dict[str, float] = field(default_factory=dict)
    #: The span around all that this worker does for the request.
    root: Span = NO_SPAN
    #: The `metrics_dict` of the engine's last result for the request on this worker.
    measured: Mapping[Any, Any] = field(default_factory=dict)

    def chose(self, strategy: str, reason: str) -> None:
        """Record the choice. The last one recorded counts: it is closest to what ran."""
        self.strategy, self.reason = strategy, reason

    def fell_back(self, to: str, because: object) -> None:
        """Record a fallback step. `because`: an error, or a sentence about a wish that could not be met."""
        self.fallbacks.append(f"{to}: {because}")
        self.steps.append((to, "wish" if isinstance(because, str) else type(because).__name__))

    def forget(self, instance_id: int) -> None:
        """Drop the facts that name this instance: it has failed the request, as a fallback step says."""
        name = f"{instance_id:x}"
        for fact in [fact for fact, value in self.facts.items() if value == name]:
            del self.facts[fact]

    def to_json(self) -> dict[str, Any]:
        """The trace without its empty fields, JSON-safe."""
        own: dict[str, Any] = {"strategy": self.strategy, "reason": self.reason, "fallbacks": self.fallbacks}
        return {name: value for name, value in own.items() if value} | self.facts


class GenerateRequest(msgspec.Struct, frozen=True):
    """A validated request. `raw` is the body as it came: the second stage gets it, unknown keys included.

    Not a wire form. It is a Struct because each step makes a changed copy: of a dataclass that takes 7 us.
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
    #: A decode was called with this handoff: that its drain finds no KV says nothing about the worker that is asked.
    kv_may_be_fetched: bool = False
    #: For a drain: the handoff's `made_at`.
    kv_made_at: float | None = None
    rendezvous: Rendezvous | None = None
    #: A handle of the prompt's start in a decode engine's cache: a prefill pulls that, and computes what is missing.
    pulled: bytes | None = None
    phase_request: PhaseRequest | None = None
    #: The instance of each role that the caller asks for.
    pins: dict[str, int | None] = msgspec.field(default_factory=dict)
    #: The rank of attention DP that a router has chosen on this worker.
    dp_rank: int | None = None
    #: The conversation that the request belongs to.
    session_id: str | None = None
    #: W3C headers of the span around the request, for the engine's own spans.
    trace_headers: dict[str, str] | None = None
    #: W3C id of the span in which the sending worker called this one.
    traceparent: str | None = None
    #: What Dynamo's frontend had added for a migration, and is taken out of `raw` and `token_ids` again.
    migrated: Migrated | None = None
    #: True: a decode comes after this prefill, whatever `stop.max_tokens` is.
    decode_follows: bool = False
    #: Instances that failed this request already.
    avoid: frozenset[int] = frozenset()
    #: Instances that fail other requests, or the decode before a drain, or are full: they take this one only if no
    #: other does.
    skipped: frozenset[int] = frozenset()
    trace: RequestTrace = msgspec.field(default_factory=RequestTrace)
    #: The span of the current step; the spans of its parts are children of it.
    step: Span = NO_SPAN

    @property
    def num_choices(self) -> int:
        return self.sampling.n or 1

    @property
    def may_end_at_frontend(self) -> bool:
        """At a stop string, or an id that no engine is told, it stops the request as if its client had left."""
        stop = self.stop
        return bool(
            stop.stop or stop.stop_token_ids or stop.stop_token_ids_visible or self.output.no_stop_trim
        )

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

    def skipping(self, instance_ids: frozenset[int]) -> GenerateRequest:
        return msgspec.structs.replace(self, skipped=self.skipped | instance_ids) if instance_ids else self

    def with_rendezvous(self, rendezvous: Rendezvous) -> GenerateRequest:
        return msgspec.structs.replace(self, rendezvous=rendezvous)

    def with_handoff(self, handoff: Handoff) -> GenerateRequest:
        return msgspec.structs.replace(self, prefill_result=handoff.result)

    def only_fetching(self, handoff: Handoff) -> GenerateRequest:
        """A decode that fetches a handoff's KV, which frees its sender's blocks, and drops it. It has none of the
        request's options: the decode before it may have been refused for them. An instance that may be fetching the KV
        now is avoided: two fetches of one handoff can end an engine. One that has failed a decode may fail a drain too.
        """
        receivers = frozenset() if handoff.receiver is None else frozenset({handoff.receiver})
        salt: dict[str, Any] = {} if self.cache_salt is None else {"routing": {"cache_salt": self.cache_salt}}
        raw = {"token_ids": self.token_ids, "stop_conditions": {"max_tokens": 1}} | salt
        return msgspec.structs.replace(
            self,
            raw=raw | {"sampling_options": {"temperature": 0.0}},
            stop=StopConditions(max_tokens=1),
            sampling=SamplingOptions(temperature=0.0),
            output=OutputOptions(),
            annotations=(),
            pins={},
            phase_request=None,
            prefill_result=handoff.result,
            kv_may_be_fetched=bool(receivers),
            kv_made_at=handoff.made_at,
            avoid=self.avoid | receivers if handoff.is_being_fetched else self.avoid,
            skipped=self.skipped | receivers,
        )


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


#: The key of `engine_data` under which Dynamo's frontend reads the prompt's logprobs.
PROMPT_LOGPROBS = "prompt_logprobs"


class TokenChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens on their way to the client; the last one has finish_reason and usage."""

    token_ids: list[int]
    index: int = 0
    log_probs: list[float] | None = None
    #: For each token the alternatives, the chosen one included: {rank, token_id, token, logprob}.
    top_logprobs: list[list[dict[str, Any]]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_usage: Usage | None = None
    disaggregated_params: dict[str, Any] | None = None
    engine_data: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    #: Dynamo passes it to the worker that continues this answer when this worker dies (`wire/migration_link.py`).
    worker_trace_link: dict[str, str] | None = None

    @property
    def of_prompt(self) -> dict[str, Any] | None:
        """The part of `engine_data` that only the engine that computed the prompt can provide."""
        of_prompt = (self.engine_data or {}).get(PROMPT_LOGPROBS)
        return None if of_prompt is None else {PROMPT_LOGPROBS: of_prompt}

    def without_end(self) -> TokenChunk:
        """The same tokens and usage, without what else the last chunk of a prefill phase has."""
        usage = self.completion_usage
        return TokenChunk(self.token_ids, self.index, self.log_probs, self.top_logprobs, None, None, usage)


@dataclass(slots=True)
class Handoff:
    """The result of the prefill phase: the whole answer (`is_final`), or the first token and a handle on the KV.

    Its owner has the duty to see that a decode fetches the KV, or to call `release`.
    """

    first: TokenChunk
    result: PrefillResult | None
    #: Frees the prefill engine's KV, which no decode will fetch; never waits.
    on_release: Callable[[Handoff], None] | None = None
    #: Called once when the duty ends here: decode has the KV, or it was released.
    on_end: Callable[[], None] | None = None
    #: The decode instance that was called with this handoff: it may have begun to fetch the KV.
    receiver: int | None = None
    #: As far as is known here, it still works on that.
    is_being_fetched: bool = False
    #: For the `engine_data` of the answer's last chunk.
    of_prompt: dict[str, Any] | None = None
    #: The instance that has the KV; None: this worker, or not known.
    sender: int | None = None
    #: About when its lease began.
    made_at: float = field(default_factory=time.monotonic)

    @classmethod
    def not_ours(cls) -> Handoff:
        """For a decode with KV that another worker, or the engines themselves, have the duty to release."""
        return cls(TokenChunk([]), None)

    @property
    def is_final(self) -> bool:
        return self.result is None

    def as_chunk(self, num_prompt: int) -> TokenChunk:
        """A prefill worker's answer to another process; Dynamo's own PrefillRouter reads the same keys."""
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

    def is_fetched_for_a_client_that_left(self, context: RequestContext) -> bool:
        """A decode worker that was called fetches before it stops for its client; a second fetch would fail there."""
        return self.receiver is not None and context.is_stopped()

    def decode_has_it(self) -> None:
        """A decode engine fetches the KV, or has fetched it: nothing is left to release."""
        self.on_release = None
        self._end()

    def caller_has_it(self) -> Callable[[], None]:
        """Another worker has the duty now; the KV is still here. Return a function that takes it back, to release."""
        on_release, self.on_release = self.on_release, None

        def take_back() -> None:
            self.on_release = on_release
            self.release()

        return take_back

    def release(self) -> None:
        """Idempotent; does nothing after `decode_has_it` or `caller_has_it`."""
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release(self)
            self._end()

    def _end(self) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()


class RequestContext(Protocol):
    """What handlers use of Dynamo's Context."""

    def id(self) -> str | None: ...

    def is_stopped(self) -> bool: ...


class PrefillPhase(Protocol):
    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        """Run context_only. Raises a DisaggError; RequestCancelledError when the client left meanwhile."""


class DecodePhase(Protocol):
    def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        """Run generation_only. The stream ends early, without an error, when the client left or it is closed."""


#: A way to answer a request: one request in, chunks out. Its reader has to close it, and not leave that to the
#: garbage collector: closing it is what aborts the request on the engine.
Generate = Callable[[GenerateRequest, RequestContext], AsyncGenerator[TokenChunk, None]]
