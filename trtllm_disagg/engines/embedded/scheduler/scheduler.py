"""Chooses the sequences of the next step: decode rows first, then prefill chunks with the rest of the token budget.
`capacity.py` decides which sequences may start and gives them KV blocks.

Prompts share the budget by TensorRT-LLM's context chunking policies. A chunk that does not finish its prompt ends on a
multiple of `alignment` tokens from the prompt's start, which keeps float32 exact (docs/decisions/0002-tiles.md); it is
also the unit of EQUAL_PROGRESS and FORCE_CHUNK. No prompt overtakes one that waits for room, so none waits for ever.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager, KvEventLog
from trtllm_disagg.engines.embedded.kv_cache.memory import KvMemory, PartialReuse, SwapSpace
from trtllm_disagg.engines.embedded.kv_cache.virtual_ids import parts_of, real_ids
from trtllm_disagg.engines.embedded.model.rows import ForwardRow
from trtllm_disagg.engines.embedded.params.llm_args import ContextChunkingPolicy, KvCacheConfig, LlmArgs
from trtllm_disagg.engines.embedded.scheduler.capacity import Capacity, Plan, Reservations
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence, Status
from trtllm_disagg.errors import ConfigError

#: Maximum prompt tiles per step with all logits.
_MAX_TILES_OF_LOGITS = 8
#: Swap space as a share of the pool, without `embedded.swap_tokens`.
_DEFAULT_SWAP = 1 / 4


class Chunking:
    """The prompts' shares of a step, by the policy in the arguments of LLM(...). Each prompt draws on the budget that
    the earlier ones left, up to the first prompt that gets nothing.

    FIRST_COME_FIRST_SERVED: all that it can use. FORCE_CHUNK: one unit, for short steps and steady decoding.
    EQUAL_PROGRESS: a unit for each prompt in turn, so that short prompts do not wait behind long ones. Without
    enable_chunked_prefill none applies, as in TensorRT-LLM: a prompt runs in one step, or waits for an emptier one.
    """

    def __init__(self, args: LlmArgs, alignment: int) -> None:
        self._unit = alignment
        policy = args.scheduler_config.context_chunking_policy if args.enable_chunked_prefill else None
        self._alternates = policy is ContextChunkingPolicy.EQUAL_PROGRESS
        self._takes_units = self._alternates or policy is ContextChunkingPolicy.FORCE_CHUNK
        #: Only a prompt with KV from a peer can be longer; if preemption loses that KV, it is computed here in chunks.
        self._longest_whole = 0 if args.enable_chunked_prefill else args.max_num_tokens

    def share(self, prompts: Seq[Sequence], budget: int) -> list[int]:
        """This step's tokens for each of `prompts`, together at most `budget`."""
        shares = [0] * len(prompts)
        for i, sequence in enumerate(prompts):
            shares[i] = self._first_share(sequence, budget)
            if not shares[i]:
                break
            budget -= shares[i]
        if self._alternates:
            self._alternate(prompts, shares, budget)
        self._bound_logits(prompts, shares)
        return shares

    def _first_share(self, sequence: Sequence, budget: int) -> int:
        if self._takes_units:
            tokens = self._next_unit(sequence, 0)
            return tokens if tokens <= budget else 0
        must_wait = budget < sequence.num_prompt - sequence.num_computed <= self._longest_whole
        return 0 if must_wait else self._piece(sequence, budget)

    def _alternate(self, prompts: Seq[Sequence], shares: list[int], budget: int) -> None:
        growing = [i for i, share in enumerate(shares) if share]
        while growing:
            still = []
            for i in growing:
                tokens = self._next_unit(prompts[i], shares[i])
                if 0 < tokens <= budget:
                    shares[i] += tokens
                    budget -= tokens
                    still.append(i)
            growing = still

    def _bound_logits(self, prompts: Seq[Sequence], shares: list[int]) -> None:
        """Cut the shares of requests for prompt logprobs: logits have the vocabulary's size per token, so those of a
        whole step may not fit into memory.
        """
        left = _MAX_TILES_OF_LOGITS * self._unit
        for i, sequence in enumerate(prompts):
            if sequence.num_scored < sequence.num_prompt:
                shares[i] = self._piece(sequence, min(shares[i], left))
                left -= shares[i]

    def _piece(self, sequence: Sequence, limit: int) -> int:
        """The rest of the prompt, or at most `limit` tokens that end on a multiple of the unit."""
        left, end = sequence.num_prompt - sequence.num_computed, sequence.num_computed + limit
        return left if left <= limit else max(0, limit - end % self._unit)

    def _next_unit(self, sequence: Sequence, given: int) -> int:
        """Number of tokens from `given` to the next multiple of the unit, or to the prompt's end."""
        start = sequence.num_computed + given
        return min(sequence.num_prompt, start - start % self._unit + self._unit) - start


class Row(ForwardRow, kw_only=True):
    """A sequence's tokens in one step. The fields keep their values from when the step was scheduled."""

    sequence: Sequence
    #: True if the row yields a token.
    samples: bool
    #: Number of last tokens that need prompt logprobs.
    num_scored: int
    #: True if it has a part of an image that this engine never had: decode has only its KV.
    lacks_image: bool

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> Row:
        begin = sequence.num_computed
        end = begin + num_tokens
        # Only a row that reaches the end of the known tokens yields a token; a partial prefill does not.
        samples = end == len(sequence.tokens)
        num_scored = max(0, min(end, sequence.num_prompt) - sequence.num_scored)
        tokens, parts = sequence.tokens[begin:end], parts_of(sequence.images, begin, end)
        return cls(
            real_ids(tokens, parts) if parts else tokens,
            begin,
            sequence.blocks,
            begin < sequence.num_prompt,
            max(int(samples), num_scored),
            sequence.image_rows(parts) if parts else (),
            sequence=sequence,
            samples=samples,
            num_scored=num_scored,
            lacks_image=bool(parts) and not sequence.vectors,
        )

    def scored(self, token: int | None) -> list[int]:
        """The tokens that follow the `num_scored` ones; the last may be `token`, the row's result."""
        end = self.num_computed + self.num_tokens
        behind = self.sequence.tokens[end - self.num_scored + 1 : end + 1]
        return behind if token is None else [*behind, token]


@dataclass(slots=True)
class Counts:
    """Sequence counts since the engine's start."""

    admitted: int = 0
    finished: int = 0
    #: Pauses; one sequence may be paused several times.
    paused: int = 0


class Scheduler:
    def __init__(self, args: LlmArgs, blocks: BlockManager, memory: KvMemory, alignment: int) -> None:
        """`alignment`: prefill chunks end on its multiples (tokens). Raises ConfigError if a step is shorter."""
        if args.max_num_tokens < alignment:
            raise ConfigError.bad_value("max_num_tokens", args.max_num_tokens, f"at least {alignment}")
        swap = SwapSpace(memory, _swap_blocks(args, blocks), blocks.tokens_per_block)
        partial = PartialReuse(args.kv_cache_config, blocks, memory)
        self.reservations = Reservations(blocks, partial, swap)
        self._capacity = Capacity(args, blocks)
        self._chunking = Chunking(args, alignment)
        # Every decode row takes one token of each step's budget.
        self._max_active = min(args.max_batch_size, args.max_num_tokens)
        self._max_num_tokens = args.max_num_tokens
        self._by_priority = args.scheduler_config.waiting_queue_policy == "priority"
        self.counts = Counts()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.receiving: set[Sequence] = set()
        #: Preempted sequences by admission; they resume in this order.
        self.paused: list[Sequence] = []

    @property
    def has_runnable(self) -> bool:
        """False if no sequence can run before a lease or a pull ends and frees blocks."""
        return bool(self.running) or (self._admits() and self._plan_next() is not None)

    @property
    def num_active(self) -> int:
        """Admitted and unfinished sequences, paused ones included."""
        return self._num_in_batch + len(self.paused)

    @property
    def _num_in_batch(self) -> int:
        return len(self.running) + len(self.receiving)

    def add(self, sequence: Sequence) -> None:
        """First come, first served; under waiting_queue_policy `priority` among equals only."""
        place = len(self.waiting)
        while self._by_priority and place and self.waiting[place - 1].priority < sequence.priority:
            place -= 1
        self.waiting.insert(place, sequence)

    def admit(self) -> Iterator[Sequence]:
        """Admit paused and waiting sequences in order, while there is room. Yields those that need KV from a peer."""
        if not self._admits():
            return
        while plan := self._plan_next():
            sequence = plan.sequence
            self.reservations.carry_out(plan)
            if sequence.status is Status.PAUSED:
                self.paused.remove(sequence)
            else:
                self.waiting.popleft()
                self._count_in(sequence)
            if sequence.wants_kv:
                sequence.status = Status.RECEIVING
                self.receiving.add(sequence)
                yield sequence
            else:
                sequence.status = Status.RUNNING
                self.running.append(sequence)

    def received(self, sequence: Sequence) -> None:
        """A sequence's KV has arrived; a generation_only one decodes from token two on."""
        self.receiving.discard(sequence)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def schedule(self) -> list[Row]:
        self._capacity.grow(self.running, self._pause)
        rows = [Row.of(s, 1) for s in self.running if not s.in_prefill]
        prompts = [s for s in self.running if s.in_prefill]
        shares = self._chunking.share(prompts, self._max_num_tokens - len(rows))
        return rows + [Row.of(s, tokens) for s, tokens in zip(prompts, shares, strict=True) if tokens]

    def finish(self, sequence: Sequence) -> None:
        """Remove the sequence, whatever its status; the caller frees its blocks."""
        self.counts.finished += 1
        match sequence.status:
            case Status.WAITING:
                self.waiting.remove(sequence)
            case Status.RUNNING:
                self.running.remove(sequence)
            case Status.RECEIVING:
                self.receiving.remove(sequence)
            case Status.PAUSED:
                self.paused.remove(sequence)
                self.reservations.forget(sequence)
        sequence.status = Status.FINISHED

    def find(self, request_id: int) -> list[Sequence]:
        return [s for s in self.unfinished() if s.request_id == request_id]

    def unfinished(self) -> list[Sequence]:
        return [*self.waiting, *self.running, *self.receiving, *self.paused]

    def _admits(self) -> bool:
        return self._capacity.admits(self._num_in_batch)

    def _plan_next(self) -> Plan | None:
        """The plan for the first paused or waiting sequence; None without one or without room."""
        if self._num_in_batch >= self._max_active or not (self.paused or self.waiting):
            return None
        first = self.paused[0] if self.paused else self.waiting[0]
        return self.reservations.plan(
            first, self._capacity.tokens_to_start(first), self._capacity.headroom(first, self.running)
        )

    def _count_in(self, sequence: Sequence) -> None:
        sequence.admission_number = self.counts.admitted
        self.counts.admitted += 1

    def _pause(self, sequence: Sequence) -> None:
        self.counts.paused += 1
        self.running.remove(sequence)
        self.reservations.give_up(sequence)
        sequence.status = Status.PAUSED
        bisect.insort(self.paused, sequence, key=lambda s: s.admission_number)


def create_blocks(config: KvCacheConfig, num_blocks: int, longest: int) -> BlockManager:
    """`longest`: tokens of the longest sequence, for the events."""
    events = KvEventLog(config.event_buffer_max_size, longest)
    return BlockManager(
        num_blocks, config.tokens_per_block, enable_reuse=config.enable_block_reuse, events=events
    )


def _swap_blocks(args: LlmArgs, blocks: BlockManager) -> int:
    tokens = args.embedded.swap_tokens
    return int(blocks.num_blocks * _DEFAULT_SWAP) if tokens is None else tokens // blocks.tokens_per_block
