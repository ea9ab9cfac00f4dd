"""One choice of one request while the engine works on it."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from trtllm_disagg.embedded.ipc.messages import (
    NOT_ADMITTED,
    AddRequest,
    Admission,
    LogprobEntry,
    Measured,
    ReceivedHandoff,
    Rendezvous,
    SamplingSpec,
)
from trtllm_disagg.embedded.kv_cache.memory import Saved
from trtllm_disagg.kv_transfer.handle import KvHandle

if TYPE_CHECKING:
    from trtllm_disagg.embedded.guided_decoding.guides import Guide


#: Seconds.
Clock = Callable[[], float]


class NullRequestTimer:
    """For requests that are not measured."""

    def scheduled(self, step: int) -> None:
        """It is in this step of the engine."""

    def has_token(self, step: int) -> None:
        """One more."""

    def transfer_began(self) -> None:
        """Its KV is asked for."""

    def transfer_ended(self, num_bytes: int) -> None:
        """Its KV is here; so many bytes came."""

    def snapshot(self, admission: Admission) -> Measured | None:
        """What is known by now."""
        return None


class RequestTimer(NullRequestTimer):
    """How long the stages of one choice take and what its KV costs, for requests with `return_perf_metrics`."""

    def __init__(self, arrived: float, clock: Clock = time.monotonic) -> None:
        """`arrived`: by `clock`."""
        self._clock = clock
        self._measured = Measured(arrived)

    def scheduled(self, step: int) -> None:
        measured = self._measured
        if measured.first_step is None:
            measured.first_step = step
            measured.first_scheduled = measured.first_scheduled or self._clock()
        if not measured.first_token:
            measured.chunks.append(self._clock())

    def has_token(self, step: int) -> None:
        measured = self._measured
        measured.last_token, measured.last_step = self._clock(), step
        measured.first_token = measured.first_token or measured.last_token

    def transfer_began(self) -> None:
        self._measured.transfer_start = self._clock()

    def transfer_ended(self, num_bytes: int) -> None:
        # Until now it has waited: its first token may be there before its first step.
        measured = self._measured
        measured.transfer_end = measured.first_scheduled = self._clock()
        measured.transfer_bytes = num_bytes

    def snapshot(self, admission: Admission) -> Measured | None:
        self._measured.admission = admission
        return self._measured


NO_TIMER = NullRequestTimer()


#: For requests that have none of their own. Not the system's generator: that is a system call for each.
_seeds = random.Random()


class Status(Enum):
    WAITING = auto()  # no blocks yet
    RECEIVING = auto()  # generation_only: its KV is on the way
    RUNNING = auto()
    PAUSED = auto()  # preempted: its tokens are kept, its blocks are not
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt + output; the KV of the first `num_computed` of them is in `blocks`."""

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
    #: Which tokens may come next, when a grammar says so.
    guide: Guide | None = None
    timer: NullRequestTimer = NO_TIMER
    admission: Admission = NOT_ADMITTED
    stream_interval: int = 1
    #: Of its last tokens, which the client has not heard of yet.
    num_untold: int = 0
    untold_logprobs: list[LogprobEntry] = field(default_factory=list)

    arrived: float = field(default_factory=time.monotonic)
    status: Status = Status.WAITING
    aborted: bool = False
    #: When it was admitted first, counted from 0.
    admission_number: int = -1
    #: Its KV, while it is paused and there was room to put it aside.
    saved: Saved | None = None
    blocks: list[int] = field(default_factory=list)
    #: Keys of the prompt's full blocks, once asked for.
    prompt_keys: list[bytes] | None = None
    #: Keys of the full blocks with committed content; a prefix of `blocks`.
    keys: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    #: Prompt tokens with KV found in the cache (of the prefill side, when there was one).
    num_cached: int = 0
    #: context_only: the first blocks of the prompt that decode has, and that need not be computed here.
    num_fetchable: int = 0
    #: Of the prompt's first positions, where they are asked for (`SamplingSpec.prompt_logprobs`).
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
            seed=seed & (2**63 - 1),
            cache_salt=request.cache_salt,
            priority=request.priority,
            handoff=request.handoff,
            handle=handle,
            rendezvous=request.rendezvous,
            timer=NO_TIMER if request.arrived is None else RequestTimer(request.arrived, clock),
            arrived=clock(),
            stream_interval=request.stream_interval,
        )

    @property
    def measured(self) -> Measured | None:
        """What it took until now; None for a request that is not measured."""
        return self.timer.snapshot(self.admission)

    @property
    def salt(self) -> bytes:
        """What its first block's key starts with: longer than a key, so never mistaken for a parent's."""
        return hashlib.blake2b(self.cache_salt.encode(), digest_size=32).digest() if self.cache_salt else b""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def keeps_its_tokens(self) -> bool:
        """Until there are more of them, or it ends; the client hears of the first one at once."""
        return self.num_output > 1 and self.num_output % self.stream_interval != 0

    @property
    def num_silent(self) -> int:
        """Of its next tokens, so many the client hears of only with later ones, and none of them ends the answer."""
        spec, count = self.sampling, self.num_output
        if self.guide is not None or spec.end_ids or spec.stop_words or not count:
            return 0
        return min(self.stream_interval - count % self.stream_interval, spec.max_tokens - count) - 1

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def in_prefill(self) -> bool:
        return self.num_computed < self.num_prompt

    @property
    def num_scored(self) -> int:
        """Of the prompt's positions, the first so many need no logits (any more) for their logprobs."""
        return self.num_prompt if self.sampling.prompt_logprobs is None else len(self.prompt_logprobs)

    @property
    def num_reusable(self) -> int:
        """Of the prompt's tokens, so many need no computing: the last one's logits make the first token."""
        return min(self.num_prompt - 1, self.num_scored)

    @property
    def has_first_token(self) -> bool:
        """Its first output token is known, here or on the prefill side: no logits of the prompt are needed."""
        return self.num_output > 0 or self.is_generation_only

    @property
    def is_context_only(self) -> bool:
        return self.request_type == "context_only"

    @property
    def is_generation_only(self) -> bool:
        return self.request_type == "generation_only"

    @property
    def wants_kv(self) -> bool:
        """Before it can run, another engine's KV has to come here."""
        return self.num_output == 0 and (self.is_generation_only or self.num_fetchable > len(self.keys))

    @property
    def is_filled(self) -> bool:
        """A read of a finished prefill is under way; its blocks are free only when that has ended."""
        return self.status is Status.RECEIVING and self.rendezvous is None

    @property
    def is_pinned(self) -> bool:
        """Another engine is sent its blocks while they are filled: it cannot be paused."""
        return self.rendezvous is not None and self.is_context_only

    @property
    def max_kv_tokens(self) -> int:
        """Tokens of KV that this sequence can ever need: the last output token's is never computed."""
        if self.is_context_only:
            return self.num_prompt
        return self.num_prompt + self.sampling.max_tokens - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Does the token that was just appended end the answer, and does the client get to see it?"""

    emit: bool = True
    #: Earlier tokens to take back: the start of a stop word that is complete only now.
    trim: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


GO_ON = Verdict()
LENGTH = Verdict(finish_reason="length")
END = Verdict(emit=False, finish_reason="stop")
#: With ignore_eos; but a grammar goes no further.
SHOWN_END = Verdict(finish_reason="stop")


def judge(sequence: Sequence) -> Verdict:
    """End tokens first, then stop words, then max_tokens; none of the first two before min_tokens, unless
    a grammar has nothing else to offer.
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
    if guide is not None and sequence.tokens[-1] in guide.end_ids:
        return SHOWN_END
    if sequence.num_output >= spec.max_tokens:
        return LENGTH
    return GO_ON
