"""The types that a request passes through, in order. The Structs are also wire forms: their encoded field names are
Dynamo's keys. Unknown keys of a request are ignored here and forwarded unchanged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
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
        # An empty schema is valid: it allows any JSON.
        return self.guided_decoding is not None and any(
            guide not in (None, False, "", []) for guide in self.guided_decoding.values()
        )


class OutputOptions(msgspec.Struct, frozen=True):
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    #: True: the client also gets stop tokens.
    no_stop_trim: bool | None = None


class Routing(msgspec.Struct, frozen=True):
    cache_salt: str | None = None
    #: 32 bits in Dynamo.
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None = None
    #: Pins of the second stage; Dynamo's frontend reads them from headers and `nvext`.
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None
    #: `nvext.agent_hints.priority`: any number, higher first; 0 by default.
    priority: int | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    cached_tokens: int | None = None


#: The key of `disaggregated_params` with those of further choices.
CHOICES = "trtllm_disagg_choices"


class PrefillResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The prefill's result: the engine's handle, and the counts for the answer's usage."""

    disaggregated_params: dict[str, Any]
    prompt_tokens_details: PromptTokensDetails | None = None

    def with_choices(self, others: Sequence[PrefillResult | None]) -> PrefillResult:
        """The first choice's result, which carries the others: Dynamo's router passes on only one."""
        params = [each and each.disaggregated_params for each in others]
        return PrefillResult(self.disaggregated_params | {CHOICES: params}, self.prompt_tokens_details)

    def of_choice(self, index: int) -> PrefillResult | None:
        """None: this choice had no prefill."""
        if index == 0:
            return self
        given = self.disaggregated_params.get(CHOICES)
        params = given[index - 1] if isinstance(given, list) and index <= len(given) else None
        return PrefillResult(params, self.prompt_tokens_details) if isinstance(params, dict) else None


#: Bounds of values from the network: host name, TCP port, 63-bit number, token or rank, block index, and Dynamo's
#: numbers, finite and not NaN.
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Number63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Float32 = Annotated[float, msgspec.Meta(ge=-3.5e38, le=3.5e38)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class KvTransferParams(msgspec.Struct, frozen=True):
    """A handoff in the two-phase protocol, with vLLM's names, except the last two."""

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
    """Where decode meets the prefill engine when both phases are dispatched at once."""

    disagg_request_id: Number63
    #: The prefill engine's endpoint; until 0.2.0 a list of one.
    ctx_info_endpoint: str | list[str]
    #: The prefill engine's rank of attention DP; None: decode asks all ranks.
    ctx_dp_rank: Int32 | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "ctx_info_endpoint", one_endpoint(self.ctx_info_endpoint))


def one_endpoint(given: str | list[str]) -> str:
    """The endpoint, given alone or in a list. Raises ValueError unless the list has one."""
    if isinstance(given, str):
        return given
    if len(given) != 1:
        raise ValueError(f"ctx_info_endpoint: {len(given)} endpoints; expected one")
    return given[0]


#: 32 bits, as in engines.
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

#: The maximum number of prefills named by a message.
MAX_ATTEMPTS = 1000
Attempts = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=MAX_ATTEMPTS)
]


class PhaseRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker asks of another. A frontend's request has none: it asks for the whole answer."""

    phase: Literal["prefill", "decode", "whole", "recall", "fetched"]
    #: For "whole": the order that the sender chose.
    strategy: str | None = None
    #: The id of this prefill attempt (a retry has a new one); for "recall" and "fetched": the attempts concerned.
    attempts: Attempts = ()
    #: For "prefill": the instance that asks.
    sender: int | None = None
    #: For "prefill": earlier attempts with KV that the sender's engine has begun to fetch, reported once.
    fetched: Attempts = ()
    #: For "whole": the decode worker that sends it because its batch is full. It decodes only if no other can.
    full: int | None = None

    @property
    def is_notice(self) -> bool:
        """Notices are about prefills that this worker answered: no engine runs them, no client waits."""
        return self.phase in ("recall", "fetched")


class Migrated(NamedTuple):
    #: The tokens the client has.
    delivered: list[int]
    #: The seed drawn by an earlier worker; 0: the request has its own.
    seed: int


class WireRequest(msgspec.Struct, frozen=True):
    """A request, as Dynamo's frontend or the first stage sends it."""

    token_ids: list[TokenId]
    stop_conditions: StopConditions | None = None
    sampling_options: SamplingOptions | None = None
    output_options: OutputOptions | None = None
    routing: Routing | None = None
    annotations: list[str] | None = None
    prefill_result: PrefillResult | None = None
    priority: Float32 | None = None
    rendezvous: Rendezvous | None = None
    phase_request: PhaseRequest | None = None
    kv_transfer_params: KvTransferParams | None = None
    bootstrap_host: Host | None = None
    bootstrap_port: Port | None = None
    bootstrap_room: Number63 | None = None
    #: W3C id of the span in which the first stage sent the request.
    traceparent: Annotated[str, msgspec.Meta(max_length=128)] | None = None


class InProgress:
    """Counts running `with` blocks, and `enter` calls until their result is called."""

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
    """How a request continues after a failure, as logs, metrics and answers name it."""

    OTHER_INSTANCE = "other_instance"  # in place of the one that failed, or of a pinned one
    LOCAL = "local"  # this worker alone
    OTHER_STAGE = "other_stage"  # a worker of the other role answers the whole request
    DIRECT = "direct"  # a prefill worker, without the prefill queue


@dataclass(slots=True)
class RequestTrace:
    """What one worker did for a request, and why; for log line, answer and metrics."""

    #: What ran: prefill_first, decode_first, local (this worker did both phases), router or agg.
    strategy: str = ""
    #: Why that strategy ran: "default", "annotation", or a decider's reason.
    reason: str = ""
    #: One entry for each fallback step: "other_instance: ...", "local: ...".
    fallbacks: list[str] = field(default_factory=list)
    #: The same for metrics: (the `Fallback`, the class name of the failure).
    steps: list[tuple[str, str]] = field(default_factory=list)
    #: Facts for the answer: {"prefill_instance": "1a2b", ...}.
    facts: dict[str, Any] = field(default_factory=dict)
    #: Prompt tokens, and those cached on this worker, for Dynamo's router; None: the engine does not count them.
    cache_hit: dict[str, int] | None = None
    #: TensorRT-LLM's timing metrics by name, in seconds of the engine's clock; empty if not measured
    #: (`--publish-metrics`).
    engine_times: dict[str, float] = field(default_factory=dict)
    #: The span around all of this worker's work for the request.
    root: Span = NO_SPAN
    #: The `metrics_dict` of the engine's last result for the request.
    measured: Mapping[Any, Any] = field(default_factory=dict)

    def chose(self, strategy: str, reason: str) -> None:
        """Record the choice. The last one counts: it is closest to what ran."""
        self.strategy, self.reason = strategy, reason

    def fell_back(self, to: str, because: object) -> None:
        """Record a fallback step. `because`: an error, or a sentence about an unmet wish."""
        self.fallbacks.append(f"{to}: {because}")
        self.steps.append((to, "wish" if isinstance(because, str) else type(because).__name__))

    def forget(self, instance_id: int) -> None:
        """Drop the facts that name this instance, which failed the request."""
        name = f"{instance_id:x}"
        for fact in [fact for fact, value in self.facts.items() if value == name]:
            del self.facts[fact]

    def to_json(self) -> dict[str, Any]:
        """The trace without its empty fields, JSON-safe."""
        own: dict[str, Any] = {"strategy": self.strategy, "reason": self.reason, "fallbacks": self.fallbacks}
        return {name: value for name, value in own.items() if value} | self.facts


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of several choices (`n`): a separate request for the same prompt."""

    index: int
    #: The trace of the first choice, which computes the prompt.
    first: RequestTrace
    #: The answer has a token.
    prompt_is_computed: asyncio.Event


@dataclass(slots=True, eq=False)
class Images:
    """The images of one request, in the order of their markers in the prompt. All its attempts and choices share it."""

    #: As a frontend sends them: {"Url": "https:..."} or {"Url": "data:..."}.
    references: list[dict[str, str]]
    #: The frontend's hashes, for engines' KV events; empty: none.
    hashes: list[str]
    #: Options for the engine's image processor.
    processor_kwargs: dict[str, Any] | None = None
    #: The scope of the cache of loaded images that this request may use.
    cache_scope: str | None = None
    #: Number of tokens that expanded markers add to the prompt; None: unknown until an engine has counted.
    num_added: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True):
    """A validated request. `raw` is the body as it came: the second stage gets it, with unknown keys.

    Not a wire form. It is a Struct since each step copies it, which takes 7 us for a dataclass.
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
    #: None: the prompt is text, or its KV comes with the prefill result.
    images: Images | None = None
    #: The number of tokens at the end of `token_ids` that are of the answer, not of the prompt.
    num_appended: int = 0
    #: A decode was called with this handoff: if its drain finds no KV, the asked worker is not to blame.
    kv_may_be_fetched: bool = False
    #: For a drain: the handoff's `made_at`.
    kv_made_at: float | None = None
    rendezvous: Rendezvous | None = None
    phase_request: PhaseRequest | None = None
    #: None: the answer has one choice.
    choice: Choice | None = None
    #: The instances pinned by the caller, by role.
    pins: dict[str, int | None] = msgspec.field(default_factory=dict)
    #: The attention-DP rank that a router chose on this worker.
    dp_rank: int | None = None
    #: The conversation that the request belongs to.
    session_id: str | None = None
    #: W3C headers of the span around the request, for the engine's own spans.
    trace_headers: dict[str, str] | None = None
    #: W3C id of the span in which the sending worker called this one.
    traceparent: str | None = None
    #: What Dynamo's frontend added for a migration; already removed from `raw` and `token_ids`.
    migrated: Migrated | None = None
    #: True: a decode follows this prefill, whatever `stop.max_tokens` is.
    decode_follows: bool = False
    #: Instances that failed this request.
    avoid: frozenset[int] = frozenset()
    #: Instances that fail other requests, may be fetching a drained handoff, or are full: used only if no other can.
    skipped: frozenset[int] = frozenset()
    trace: RequestTrace = msgspec.field(default_factory=RequestTrace)
    #: The current step's span, parent of its parts' spans.
    span: Span = NO_SPAN

    @property
    def num_choices(self) -> int:
        return self.sampling.n or 1

    @property
    def num_prompt(self) -> int:
        """The prompt's tokens, images expanded; without them as long as their number is unknown."""
        return len(self.token_ids) + (self.images.num_added or 0 if self.images is not None else 0)

    @property
    def has_known_length(self) -> bool:
        return self.images is None or self.images.num_added is not None

    @property
    def is_further_choice(self) -> bool:
        return self.choice is not None and self.choice.index > 0

    @property
    def may_end_at_frontend(self) -> bool:
        """At a stop string or id that no engine gets, the frontend stops the request as if its client had left."""
        stop = self.stop
        return bool(
            stop.stop or stop.stop_token_ids or stop.stop_token_ids_visible or self.output.no_stop_trim
        )

    @property
    def computes_prompt(self) -> bool:
        """False for a decode, which TensorRT-LLM fails if it asks for the prompt's logprobs (`base_worker.py`)."""
        return self.prefill_result is None

    def within(self, span: Span) -> GenerateRequest:
        return msgspec.structs.replace(self, span=span) if span.is_recording else self

    def salted(self, cache_salt: str) -> GenerateRequest:
        """A copy with this cache salt, also for the second stage."""
        routing = dict(self.raw.get("routing") or {}) | {"cache_salt": cache_salt}
        return msgspec.structs.replace(self, raw=self.raw | {"routing": routing}, cache_salt=cache_salt)

    def avoiding(self, instance_id: int) -> GenerateRequest:
        return msgspec.structs.replace(self, avoid=self.avoid | {instance_id})

    def skipping(self, instance_ids: frozenset[int]) -> GenerateRequest:
        return msgspec.structs.replace(self, skipped=self.skipped | instance_ids) if instance_ids else self

    def with_rendezvous(self, rendezvous: Rendezvous) -> GenerateRequest:
        return msgspec.structs.replace(self, rendezvous=rendezvous)

    def with_handoff(self, handoff: Handoff) -> GenerateRequest:
        return msgspec.structs.replace(self, prefill_result=handoff.result)

    def with_tokens(self, token_ids: list[int]) -> GenerateRequest:
        """A request for one greedy token behind these, without options, which an engine might refuse."""
        raw: dict[str, Any] = {"sampling_options": {"temperature": 0.0}, "stop_conditions": {"max_tokens": 1}}
        raw |= {} if self.cache_salt is None else {"routing": {"cache_salt": self.cache_salt}}
        return msgspec.structs.replace(
            self,
            raw=raw | {"token_ids": token_ids},
            token_ids=token_ids,
            stop=StopConditions(max_tokens=1),
            sampling=SamplingOptions(temperature=0.0),
            output=OutputOptions(),
            annotations=(),
            pins={},
            phase_request=None,
            images=None,
            num_appended=0,
        )

    def only_fetching(self, handoff: Handoff) -> GenerateRequest:
        """A decode that drops what it fetches. It skips an instance that may be fetching: two can end an engine."""
        receivers = frozenset() if handoff.receiver is None else frozenset({handoff.receiver})
        return msgspec.structs.replace(
            self.with_tokens(self.token_ids),
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


#: The key of `engine_data` where Dynamo's frontend reads the prompt's logprobs.
PROMPT_LOGPROBS = "prompt_logprobs"


class TokenChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens on their way to the client; the last one has finish_reason and usage."""

    token_ids: list[int]
    index: int = 0
    log_probs: list[float] | None = None
    #: Each token's alternatives, the chosen one included: {rank, token_id, token, logprob}.
    top_logprobs: list[list[dict[str, Any]]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_usage: Usage | None = None
    disaggregated_params: dict[str, Any] | None = None
    engine_data: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    #: If this worker dies, Dynamo passes it to the worker that continues the answer (`wire/migration_link.py`).
    worker_trace_link: dict[str, str] | None = None

    @property
    def of_prompt(self) -> dict[str, Any] | None:
        """The part of `engine_data` known only to the engine that computed the prompt."""
        of_prompt = (self.engine_data or {}).get(PROMPT_LOGPROBS)
        return None if of_prompt is None else {PROMPT_LOGPROBS: of_prompt}

    def without_end(self) -> TokenChunk:
        """Only tokens and usage of a prefill's last chunk."""
        usage = self.completion_usage
        return TokenChunk(self.token_ids, self.index, self.log_probs, self.top_logprobs, None, None, usage)


@dataclass(slots=True)
class Handoff:
    """A prefill's result: the whole answer (`is_final`), or the first token and a handle on the KV.

    Its owner must get the KV fetched by a decode, or call `release`.
    """

    first: TokenChunk
    result: PrefillResult | None
    #: Frees the prefill engine's KV, if no decode will fetch it. Never waits.
    on_release: Callable[[Handoff], None] | None = None
    #: Called once when the duty ends: decode has the KV, or it was released.
    on_end: Callable[[], None] | None = None
    #: The decode instance called with this handoff: it may have begun to fetch the KV.
    receiver: int | None = None
    #: That call may still run.
    is_being_fetched: bool = False
    #: For the `engine_data` of the answer's last chunk.
    of_prompt: dict[str, Any] | None = None
    #: The instance that has the KV; None: this worker, or unknown.
    sender: int | None = None
    #: About when its lease began.
    made_at: float = field(default_factory=time.monotonic)

    @classmethod
    def not_ours(cls) -> Handoff:
        """For a decode with KV that another worker or the engines release."""
        return cls(TokenChunk([]), None)

    @property
    def is_final(self) -> bool:
        return self.result is None

    def as_chunk(self, num_prompt: int) -> TokenChunk:
        """A prefill worker's answer to another process, with the keys that Dynamo's PrefillRouter reads."""
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

    def is_fetched_for_a_client_that_left(self, context: RequestContext | None) -> bool:
        """A called decode worker fetches before it stops for its client; a second fetch would fail."""
        return self.receiver is not None and context is not None and context.is_stopped()

    def decode_has_it(self) -> None:
        """End the duty: a decode engine fetches or has fetched the KV."""
        self.on_release = None
        self._end()

    def caller_has_it(self) -> Callable[[], None]:
        """Pass the duty to another worker; the KV stays. Returns a function that takes the duty back, to release."""
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
    """The part of Dynamo's Context that handlers use."""

    def id(self) -> str | None: ...

    def is_stopped(self) -> bool: ...


class PrefillPhase(Protocol):
    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        """Run context_only. Raises a DisaggError; RequestCancelledError if the client left."""


class DecodePhase(Protocol):
    def __call__(
        self, request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        """Run generation_only. The stream ends early, without an error, if the client leaves or closes it."""


#: Answers a request: one request in, chunks out. Its reader must close it, since closing aborts the request on the
#: engine; the garbage collector would be late.
Generate = Callable[[GenerateRequest, RequestContext], AsyncGenerator[TokenChunk, None]]
