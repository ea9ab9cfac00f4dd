"""The messages between the LLM object (in the worker) and the engine core (its own process): msgpack, typed."""

from __future__ import annotations

from typing import Any

import msgspec

#: One generated token's logprobs: (token id, logprob, rank), the chosen token first.
LogprobEntry = list[tuple[int, float, int]]


#: Of the embedded engine.
BUILDER = "trtllm_disagg.embedded.core.build:for_process"


class Start(msgspec.Struct):
    """The first line of standard input, JSON."""

    args: dict[str, Any]
    #: Of the worker's socket.
    address: str
    #: `module:function` that makes the core, from the arguments, this process and a `Reporter`.
    builder: str = BUILDER
    #: None: a step may take for ever.
    step_timeout_seconds: float | None = None
    log_level: str = "INFO"


class SamplingSpec(msgspec.Struct, frozen=True):
    """SamplingParams after validation: no None, nothing left to decide in the hot loop."""

    max_tokens: int
    min_tokens: int = 0
    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    #: Ends the output silently: never returned, never counted.
    end_ids: tuple[int, ...] = ()
    #: End the output and name themselves in stop_reason.
    stop_words: tuple[tuple[int, ...], ...] = ()
    #: stop_reason of each stop word: the id for a stop token id, the text for a stop string.
    stop_reasons: tuple[int | str, ...] = ()
    include_stop: bool = False
    bad_token_ids: tuple[int, ...] = ()
    #: What the output must match, as llguidance writes it.
    grammar: str | None = None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class ReceivedHandoff(msgspec.Struct, frozen=True):
    """What a generation_only request brings along."""

    opaque_state: bytes
    first_gen_tokens: list[int]
    first_logprobs: list[LogprobEntry] | None = None


class Rendezvous(msgspec.Struct, frozen=True):
    """GENERATION_FIRST: by what the two halves of a request find each other."""

    #: `disagg_request_id`, the same for both.
    request: int
    #: generation_only: the prefill engine's control channel.
    endpoint: str = ""


class AddRequest(msgspec.Struct, tag="add"):
    request_id: int
    prompt: list[int]
    sampling: SamplingSpec
    request_type: str
    num_choices: int = 1
    priority: float = 0.5
    cache_salt: str = ""
    handoff: ReceivedHandoff | None = None
    rendezvous: Rendezvous | None = None
    #: When the client asked, by this machine's monotonic clock; None: the request is not measured.
    arrived: float | None = None
    #: The client hears of the first token, of every so manieth, and of the end.
    stream_interval: int = 1


class AbortRequest(msgspec.Struct, tag="abort"):
    request_id: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    pass


Command = AddRequest | AbortRequest | Shutdown


class MadeHandoff(msgspec.Struct):
    """What a context_only request leaves behind."""

    opaque_state: bytes
    first_gen_tokens: list[int]
    ctx_request_id: int
    ctx_info_endpoint: str


class Admission(msgspec.Struct, frozen=True):
    """Blocks of one choice when it was admitted: taken from the pool, and of its prompt found in the cache or not."""

    allocated: int = 0
    reused: int = 0
    missed: int = 0


NOT_ADMITTED = Admission()


class Measured(msgspec.Struct, omit_defaults=True):
    """What one choice took. Times are seconds of this machine's monotonic clock; 0 is for what did not happen."""

    arrival: float
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    transfer_start: float = 0.0
    transfer_end: float = 0.0
    transfer_bytes: int = 0
    admission: Admission = NOT_ADMITTED
    #: When each step with a part of its prompt began.
    chunks: list[float] = []
    #: Steps of the engine.
    first_step: int | None = None
    last_step: int | None = None


class TokenOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """New tokens of one choice of one request. There is one for every token, so most of it is not even sent."""

    request_id: int
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[LogprobEntry] | None = None
    #: With the first token, for requests that ask: of each position of the prompt, about the token behind it.
    prompt_logprobs: list[LogprobEntry] = []
    #: In so many steps of the engine.
    num_steps: int = 1
    #: Tokens to cut from the end of what was already returned (a multi-token stop word).
    trim: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    #: DisaggError.category (trtllm_disagg.errors).
    error_category: str = "Internal"
    cached_tokens: int = 0
    handoff: MadeHandoff | None = None
    #: With the end of a choice that is measured.
    measured: Measured | None = None


class StepReport(msgspec.Struct, tag="step"):
    """All that one step of the engine has to say; one message a step, however many requests ran."""

    outputs: list[TokenOutput]
    #: Requests that wait or run, and prompts with KV held for another engine.
    num_active: int = 0
    events: list[dict[str, Any]] = []
    stats: list[dict[str, Any]] = []


class Ready(msgspec.Struct, tag="ready"):
    num_blocks: int
    tokens_per_block: int
    vocab_size: int
    max_seq_len: int
    transport: str
    end_ids: list[int]
    #: Process ids of the engine, rank 0 (which is the engine core) first.
    pids: list[int]
    #: Where the KV control channel listens; empty without one.
    endpoint: str = ""
    #: A token's bits depend on its request only.
    is_exact: bool = False


class Failed(msgspec.Struct, tag="failed"):
    """The core cannot start, or cannot go on."""

    kind: str
    message: str


Report = Ready | Failed | StepReport
