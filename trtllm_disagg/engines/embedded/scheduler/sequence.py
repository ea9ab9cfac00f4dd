"""A sequence: one choice of one request while the engine works on it."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from trtllm_disagg.engines.embedded.ipc.messages import (
    NOT_ADMITTED,
    AddRequest,
    Admission,
    LogprobEntry,
    Measured,
    PlacedImage,
    ReceivedHandoff,
    Rendezvous,
    SamplingSpec,
)
from trtllm_disagg.engines.embedded.kv_cache.memory import Saved
from trtllm_disagg.engines.embedded.kv_cache.virtual_ids import Part
from trtllm_disagg.engines.embedded.model.rows import ImageRows
from trtllm_disagg.wire.kv_handle import KvHandle

if TYPE_CHECKING:
    import torch

    from trtllm_disagg.engines.embedded.model.guided_decoding import Guide


#: Seconds.
Clock = Callable[[], float]


class RequestTimer:
    """Measures the phases and the KV of one choice, for requests with `return_perf_metrics`."""

    def __init__(self, arrived: float, clock: Clock = time.monotonic) -> None:
        """`arrived`: by `clock`."""
        self._clock = clock
        self._measured = Measured(arrived)

    def scheduled(self) -> None:
        """The choice joins the step that begins."""
        measured = self._measured
        measured.first_scheduled = measured.first_scheduled or self._clock()
        if not measured.first_token:
            measured.chunks.append(self._clock())

    def has_token(self) -> None:
        """The choice got a token."""
        measured = self._measured
        measured.last_token = self._clock()
        measured.first_token = measured.first_token or measured.last_token

    def transfer_began(self) -> None:
        """The choice's KV was requested."""
        self._measured.transfer_start = self._clock()

    def transfer_ended(self, num_bytes: int) -> None:
        """The choice's KV has arrived. Its first token may precede its first step."""
        measured = self._measured
        measured.transfer_end = measured.first_scheduled = self._clock()
        measured.transfer_bytes = num_bytes

    def encodes(self) -> None:
        """Called before and after an image is encoded."""
        self._measured.encoding.append(self._clock())

    def snapshot(self, admission: Admission) -> Measured:
        """The measurements so far."""
        self._measured.admission = admission
        return self._measured


#: Seeds for requests without one; the system's generator would cost a system call each.
_seeds = random.Random()


class Status(Enum):
    WAITING = auto()  # no blocks yet
    RECEIVING = auto()  # generation_only: its KV is on the way
    RUNNING = auto()
    PAUSED = auto()  # preempted: its tokens are kept, its blocks are not
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt + output; `blocks` has the KV of the first `num_computed`."""

    request_id: int
    index: int
    request_type: str
    tokens: list[int]
    num_prompt: int
    sampling: SamplingSpec
    seed: int
    cache_salt: str = ""
    priority: float = 0.5
    handoff: ReceivedHandoff | None = None
    handle: KvHandle | None = None
    rendezvous: Rendezvous | None = None
    #: Restricts the next token to the grammar.
    guide: Guide | None = None
    #: None: the request is not measured.
    timer: RequestTimer | None = None
    admission: Admission = NOT_ADMITTED
    stream_interval: int = 1
    images: tuple[PlacedImage, ...] = ()
    #: (tokens, hidden) of each image, by its start. Kept to the end: a paused prompt may have to be computed again.
    #: Empty on decode.
    vectors: dict[int, torch.Tensor] = field(default_factory=dict)
    #: Number of last tokens not sent to the client yet, and their logprobs.
    num_unsent: int = 0
    unsent_logprobs: list[LogprobEntry] = field(default_factory=list)

    status: Status = Status.WAITING
    aborted: bool = False
    #: Order of its first admission, from 0.
    admission_number: int = -1
    #: Its saved KV while it is paused, if the swap space had room.
    saved: Saved | None = None
    blocks: list[int] = field(default_factory=list)
    #: Keys of the prompt's full blocks, once computed.
    prompt_keys: list[bytes] | None = None
    #: Keys of the committed full blocks, a prefix of `blocks`.
    keys: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    #: Prompt tokens found in the cache (of the prefill engine, if there was one).
    num_cached: int = 0
    #: context_only: number of the prompt's first blocks that decode can send, so they need not be computed.
    num_fetchable: int = 0
    #: Requested logprobs of the prompt's first positions (`SamplingSpec.prompt_logprobs`).
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)

    @classmethod
    def from_request(
        cls, request: AddRequest, index: int, handle: KvHandle | None, clock: Clock = time.monotonic
    ) -> Sequence:
        seed = request.sampling.seed
        if seed is None:
            seed = handle.seed if handle is not None else _seeds.getrandbits(63)
        return cls(
            request_id=request.request_id,
            index=index,
            request_type=request.request_type,
            tokens=list(request.prompt),
            num_prompt=len(request.prompt),
            sampling=request.sampling,
            seed=(seed + index) & (2**63 - 1),
            cache_salt=request.cache_salt,
            priority=request.priority,
            handoff=request.handoff,
            handle=handle,
            rendezvous=request.rendezvous,
            timer=None if request.arrived is None else RequestTimer(request.arrived, clock),
            stream_interval=request.stream_interval,
            images=tuple(request.images),
        )

    def image_rows(self, parts: Seq[Part]) -> tuple[ImageRows, ...]:
        """The vectors of parts of its images; empty without them."""
        return tuple(
            ImageRows(part.begin, self.vectors[part.image.start][part.offset :][: part.end - part.begin])
            for part in parts
            if self.vectors
        )

    @property
    def salt(self) -> bytes:
        """The parent of its first block's key; longer than a key, so never equal to one."""
        return hashlib.blake2b(self.cache_salt.encode(), digest_size=32).digest() if self.cache_salt else b""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def holds_back_tokens(self) -> bool:
        """True while tokens wait to be sent (`stream_interval`); the first is sent at once."""
        return self.num_output > 1 and self.num_output % self.stream_interval != 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def in_prefill(self) -> bool:
        return self.num_computed < self.num_prompt

    @property
    def num_scored(self) -> int:
        """Number of first prompt positions that need no further logprobs."""
        return self.num_prompt if self.sampling.prompt_logprobs is None else len(self.prompt_logprobs)

    @property
    def num_reusable(self) -> int:
        """Number of prompt tokens that may come from a cache; the last is computed, for the first token's logits."""
        return min(self.num_prompt - 1, self.num_scored)

    @property
    def has_first_token(self) -> bool:
        """True if its first output token is known, so that the prompt's logits are not needed."""
        return self.num_output > 0 or self.is_generation_only

    @property
    def is_context_only(self) -> bool:
        return self.request_type == "context_only"

    @property
    def is_generation_only(self) -> bool:
        return self.request_type == "generation_only"

    @property
    def wants_kv(self) -> bool:
        """True if it must wait for a peer's KV."""
        return self.num_output == 0 and (self.is_generation_only or self.num_fetchable > len(self.keys))

    @property
    def is_filled(self) -> bool:
        """True while a read fills its blocks; they can be freed only after it."""
        return self.status is Status.RECEIVING and self.rendezvous is None

    @property
    def is_pinned(self) -> bool:
        """True if its blocks are written to a peer while they are computed: it cannot be paused."""
        return self.rendezvous is not None and self.is_context_only

    @property
    def max_kv_tokens(self) -> int:
        """Maximum tokens with KV; the last output token's KV is never computed."""
        if self.is_context_only:
            return self.num_prompt
        return self.num_prompt + self.sampling.max_tokens - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Does the last token end the answer, and is it sent to the client?"""

    emit: bool = True
    #: Earlier tokens to take back: the start of a stop word that is now complete.
    trim: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


GO_ON = Verdict()
LENGTH = Verdict(finish_reason="length")
END = Verdict(emit=False, finish_reason="stop")
#: The end token of a grammar, which also ends answers with `ignore_eos`.
SHOWN_END = Verdict(finish_reason="stop")


def judge(sequence: Sequence) -> Verdict:
    """Checks end tokens, stop words, then max_tokens. Before min_tokens the first two count only if the grammar allows
    no other token.
    """
    spec, guide = sequence.sampling, sequence.guide
    if sequence.num_output > spec.min_tokens or (guide is not None and guide.exhausted):
        if sequence.tokens[-1] in spec.end_ids:
            return END
        for word, reason in zip(spec.stop_words, spec.stop_reasons, strict=True):
            if sequence.num_output >= len(word) and tuple(sequence.tokens[-len(word) :]) == word:
                if spec.include_stop:
                    return Verdict(finish_reason="stop", stop_reason=reason)
                return Verdict(emit=False, trim=len(word) - 1, finish_reason="stop", stop_reason=reason)
    if guide is not None and sequence.tokens[-1] in guide.model_ends:
        return SHOWN_END
    if sequence.num_output >= spec.max_tokens:
        return LENGTH
    return GO_ON
