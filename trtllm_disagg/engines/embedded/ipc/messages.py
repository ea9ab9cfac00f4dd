"""The messages between the LLM object (in the worker) and the engine core (its own process): msgpack, typed."""

from __future__ import annotations

from typing import Any

import msgspec

#: One generated token's logprobs: (token id, logprob, rank), the chosen token first.
LogprobEntry = list[tuple[int, float, int]]

#: Makes the embedded engine's core.
BUILDER = "trtllm_disagg.engines.embedded.core.build:for_process"


class Start(msgspec.Struct):
    """The first line of the core process's standard input, as JSON."""

    args: dict[str, Any]
    #: Address of the worker's socket.
    address: str
    #: `module:function` that makes the core from its arguments, a CoreProcess and a `Reporter`.
    builder: str = BUILDER
    #: Limit in seconds, after which the engine ends; None: no limit.
    step_timeout_seconds: float | None = None


class SamplingSpec(msgspec.Struct, frozen=True):
    """SamplingParams after validation, with every default resolved for the hot loop."""

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
    prompt_ignore_length: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    #: End the output; never returned or counted.
    end_ids: tuple[int, ...] = ()
    #: End the output, and become its stop_reason.
    stop_words: tuple[tuple[int, ...], ...] = ()
    #: stop_reason of each stop word: the id for a stop token id, the text for a stop string.
    stop_reasons: tuple[int | str, ...] = ()
    include_stop: bool = False
    bad_token_ids: tuple[int, ...] = ()
    #: The grammar that the output must match, in llguidance's syntax.
    grammar: str | None = None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class ReceivedHandoff(msgspec.Struct, frozen=True):
    """The handoff in a generation_only request."""

    opaque_state: bytes
    first_gen_tokens: list[int]
    first_logprobs: list[LogprobEntry] | None = None


class Rendezvous(msgspec.Struct, frozen=True):
    """GENERATION_FIRST: how the two phases of a request find each other."""

    #: `disagg_request_id`, the same in both phases.
    request: int
    #: generation_only: the prefill engine's control channel.
    endpoint: str = ""


class PlacedImage(msgspec.Struct, frozen=True):
    """An image's place in a prompt."""

    #: Position of its first token.
    start: int
    num_tokens: int
    #: The model's image token.
    token_id: int
    #: 32 bytes over size and pixels.
    digest: bytes
    #: The client's name for it; empty without one.
    uuid: str = ""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Pixels(msgspec.Struct, frozen=True):
    width: int
    height: int
    #: Three bytes (RGB) per pixel, row by row.
    data: bytes


class ImageTokens(msgspec.Struct, frozen=True):
    """A model's image token, which marks an image in a client's prompt, and the number that one image becomes."""

    token_id: int
    num_tokens: int


class AddRequest(msgspec.Struct, tag="add"):
    request_id: int
    #: With virtual ids at the places of `images` (kv_cache/virtual_ids.py).
    prompt: list[int]
    sampling: SamplingSpec
    request_type: str
    num_choices: int = 1
    priority: float = 0.5
    cache_salt: str = ""
    handoff: ReceivedHandoff | None = None
    rendezvous: Rendezvous | None = None
    #: Arrival of the request, by this machine's monotonic clock; None: the request is not measured.
    arrived: float | None = None
    #: The client gets the first token, then one output every `stream_interval` tokens, and the end.
    stream_interval: int = 1
    images: list[PlacedImage] = []
    #: The content of `images`; empty for generation_only.
    pixels: list[Pixels] = []


class AbortRequest(msgspec.Struct, tag="abort"):
    request_id: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    pass


Command = AddRequest | AbortRequest | Shutdown


class MadeHandoff(msgspec.Struct):
    """The handoff of a finished context_only request."""

    opaque_state: bytes
    first_gen_tokens: list[int]
    ctx_request_id: int
    ctx_info_endpoint: str


class Admission(msgspec.Struct, frozen=True):
    """Blocks of one choice at admission: newly allocated; prompt blocks found in the prefix cache; missed."""

    allocated: int = 0
    reused: int = 0
    missed: int = 0


NOT_ADMITTED = Admission()


class Measured(msgspec.Struct, omit_defaults=True):
    """Times of one choice in seconds of this machine's monotonic clock (0: did not happen), and its KV blocks."""

    arrival: float
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    transfer_start: float = 0.0
    transfer_end: float = 0.0
    transfer_bytes: int = 0
    admission: Admission = NOT_ADMITTED
    #: Start of each step that computed a part of the prompt.
    chunks: list[float] = []
    #: Start and end of each image's encoding.
    encoding: list[float] = []


class TokenOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """New tokens of one choice. May be sent for every token, so it omits defaults."""

    request_id: int
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[LogprobEntry] | None = None
    #: With the first token, if requested: per prompt position, logprobs of the next token.
    prompt_logprobs: list[LogprobEntry] = []
    #: Number of engine steps that made these tokens.
    num_steps: int = 1
    #: Tokens to cut from the end of the returned ones (a multi-token stop word).
    trim: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    #: DisaggError.category (trtllm_disagg.errors).
    error_category: str = "Internal"
    cached_tokens: int = 0
    handoff: MadeHandoff | None = None
    #: Sent with the end of a measured choice.
    measured: Measured | None = None


class StepReport(msgspec.Struct, tag="step"):
    """All results of one engine step, in one message."""

    outputs: list[TokenOutput]
    #: Number of waiting and running requests, and of prompts with KV held for a peer.
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
    #: Process ids of the engine's ranks; rank 0 is the engine core.
    pids: list[int]
    #: Endpoint of the KV control channel; empty without one.
    endpoint: str = ""
    #: True: the answer depends only on the request, bit for bit.
    is_exact: bool = False
    #: None for a model that takes no images.
    image_tokens: ImageTokens | None = None


class Failed(msgspec.Struct, tag="failed"):
    """The core cannot start, or cannot continue."""

    kind: str
    message: str


Report = Ready | Failed | StepReport
