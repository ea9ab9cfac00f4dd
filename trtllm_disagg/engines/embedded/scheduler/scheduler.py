"""Which sequences run in the next step: decode rows first, then prefill chunks with the rest of the token budget. Which
sequences may start, with how many KV blocks and where those come from, is `capacity.py`.

Prompts share a budget by TensorRT-LLM's context chunking policies. A chunk that does not finish its prompt ends on a
multiple of `alignment` tokens from the prompt's start, whatever the policy: that keeps float32 exact
(docs/decisions/0002-tiles.md). It is also the unit that EQUAL_PROGRESS and FORCE_CHUNK hand out. No prompt overtakes
one that waits for room, so none waits for ever.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager, KvEventLog
from trtllm_disagg.engines.embedded.kv_cache.memory import KvMemory, PartialReuse, SwapSpace
from trtllm_disagg.engines.embedded.model.rows import ForwardRow
from trtllm_disagg.engines.embedded.params.llm_args import ContextChunkingPolicy, KvCacheConfig, LlmArgs
from trtllm_disagg.engines.embedded.scheduler.capacity import Capacity, Plan, Reservations
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence, Status
from trtllm_disagg.errors import ConfigError

#: The most prompt tiles per step of which all logits are computed.
_MOST_TILES_OF_LOGITS = 8
#: The swap space as a share of the pool when `embedded.swap_tokens` is not set.
_DEFAULT_SWAP = 1 / 4


class Chunking:
    """The prompts' shares of a step, by the policy that the arguments of LLM(...) name. Each prompt gets its own from
    what the earlier ones have left, up to the first prompt that gets nothing.

    FIRST_COME_FIRST_SERVED: all that it can use. FORCE_CHUNK: one unit, even where more would fit: the shortest steps,
    so the steadiest decoding. EQUAL_PROGRESS: a unit for each prompt in turn, until the budget is used: short prompts
    are not stuck behind long ones. Without enable_chunked_prefill none of them applies, as in TensorRT-LLM: a prompt
    runs in one step, or waits for an emptier one.
    """

    def __init__(self, args: LlmArgs, alignment: int) -> None:
        self._unit = alignment
        policy = args.scheduler_config.context_chunking_policy if args.enable_chunked_prefill else None
        self._takes_turns = policy is ContextChunkingPolicy.EQUAL_PROGRESS
        self._takes_units = self._takes_turns or policy is ContextChunkingPolicy.FORCE_CHUNK
        #: Only a prompt with KV from another engine can be longer than any step. If that KV is lost to preemption, the
        #: prompt is computed here after all, and then in pieces.
        self._longest_whole = 0 if args.enable_chunked_prefill else args.max_num_tokens

    def share(self, prompts: Seq[Sequence], budget: int) -> list[int]:
        """Tokens of this step for each of `prompts`, in order; together at most `budget`."""
        shares = [0] * len(prompts)
        for i, sequence in enumerate(prompts):
            shares[i] = self._first_share(sequence, budget)
            if not shares[i]:
                break
            budget -= shares[i]
        if self._takes_turns:
            self._take_turns(prompts, shares, budget)
        self._bound_logits(prompts, shares)
        return shares

    def _first_share(self, sequence: Sequence, budget: int) -> int:
        if self._takes_units:
            tokens = self._next_unit(sequence, 0)
            return tokens if tokens <= budget else 0
        must_wait = budget < sequence.num_prompt - sequence.num_computed <= self._longest_whole
        return 0 if must_wait else self._piece(sequence, budget)

    def _take_turns(self, prompts: Seq[Sequence], shares: list[int], budget: int) -> None:
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
        """Cut where a request asks for logprobs of its prompt: the logits of a token are as many numbers as there are
        tokens in the vocabulary, so those of a whole step may not fit into the memory.
        """
        left = _MOST_TILES_OF_LOGITS * self._unit
        for i, sequence in enumerate(prompts):
            if sequence.num_scored < sequence.num_prompt:
                shares[i] = self._piece(sequence, min(shares[i], left))
                left -= shares[i]

    def _piece(self, sequence: Sequence, most: int) -> int:
        """What is left of the prompt; if that is above `most`, fewer, so that the chunk ends on a multiple."""
        left, end = sequence.num_prompt - sequence.num_computed, sequence.num_computed + most
        return left if left <= most else max(0, most - end % self._unit)

    def _next_unit(self, sequence: Sequence, taken: int) -> int:
        """The number of tokens from `taken` on to the next multiple of the unit, or to the prompt's end."""
        start = sequence.num_computed + taken
        return min(sequence.num_prompt, start - start % self._unit + self._unit) - start


class Row(ForwardRow):
    """The tokens of one sequence that go through the model in one step.

    The fields keep their values from when the step was scheduled.
    """

    sequence: Sequence
    #: Whether the row yields a token.
    samples: bool
    #: How many of its last tokens need prompt logprobs.
    num_scored: int

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> Row:
        begin = sequence.num_computed
        end = begin + num_tokens
        # Only a row that reaches the end of the known tokens yields a token; a partial prefill does not.
        samples = end == len(sequence.tokens)
        num_scored = max(0, min(end, sequence.num_prompt) - sequence.num_scored)
        return cls(
            sequence.tokens[begin:end],
            begin,
            sequence.blocks,
            begin < sequence.num_prompt,
            max(int(samples), num_scored),
            sequence,
            samples,
            num_scored,
        )

    def scored(self, token: int | None) -> list[int]:
        """The tokens that follow the `num_scored` ones; the last may be `token`, which the row yields."""
        end = self.num_computed + self.num_tokens
        behind = self.sequence.tokens[end - self.num_scored + 1 : end + 1]
        return behind if token is None else [*behind, token]


@dataclass(slots=True)
class Counts:
    """Numbers of sequences since the engine's start."""

    admitted: int = 0
    finished: int = 0
    #: Pauses; one sequence may be paused several times.
    paused: int = 0


class Scheduler:
    def __init__(self, args: LlmArgs, blocks: BlockManager, memory: KvMemory, alignment: int) -> None:
        """`alignment`: where a prefill chunk may end, in tokens from the prompt's start. Raises ConfigError when a step
        is shorter than that.
        """
        if args.max_num_tokens < alignment:
            raise ConfigError.bad_value("max_num_tokens", args.max_num_tokens, f"at least {alignment}")
        swap = SwapSpace(memory, _swap_blocks(args, blocks), blocks.tokens_per_block)
        partial = PartialReuse(args.kv_cache_config, blocks, memory)
        self.reservations = Reservations(blocks, partial, swap)
        self._capacity = Capacity(args, blocks)
        self._chunking = Chunking(args, alignment)
        # Every decode row takes a token of the budget, in every step.
        self._max_active = min(args.max_batch_size, args.max_num_tokens)
        self._max_num_tokens = args.max_num_tokens
        self._by_priority = args.scheduler_config.waiting_queue_policy == "priority"
        self.counts = Counts()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.receiving: set[Sequence] = set()
        #: Preempted sequences, in the order of their admission; they resume in this order.
        self.paused: list[Sequence] = []

    @property
    def has_runnable(self) -> bool:
        """False when no sequence can run before blocks are freed by the end of a lease or of a pull."""
        return bool(self.running) or (self._admits() and self._plan_next() is not None)

    @property
    def num_active(self) -> int:
        """Admitted and unfinished sequences, paused ones included."""
        return self._num_in_batch + len(self.paused)

    @property
    def _num_in_batch(self) -> int:
        return len(self.running) + len(self.receiving)

    def add(self, sequence: Sequence) -> None:
        """First come, first served; with waiting_queue_policy `priority` only among equals."""
        place = len(self.waiting)
        while self._by_priority and place and self.waiting[place - 1].priority < sequence.priority:
            place -= 1
        self.waiting.insert(place, sequence)

    def admit(self) -> Iterator[Sequence]:
        """Move paused and waiting sequences in, first ones first, while there is room.

        Yields the sequences that need KV from another engine.
        """
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
        """The KV of a sequence is here: a generation_only one decodes from token two on."""
        self.receiving.discard(sequence)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """The KV of a prefill's first blocks does not come: it is first in line again, and computes them."""
        self.receiving.remove(sequence)
        sequence.status, sequence.handle, sequence.num_fetchable = Status.WAITING, None, 0
        sequence.blocks, sequence.keys, sequence.num_computed = [], [], 0
        self.waiting.appendleft(sequence)

    def schedule(self) -> list[Row]:
        self._capacity.grow(self.running, self._pause)
        rows = [Row.of(s, 1) for s in self.running if not s.in_prefill]
        prompts = [s for s in self.running if s.in_prefill]
        shares = self._chunking.share(prompts, self._max_num_tokens - len(rows))
        return rows + [Row.of(s, tokens) for s, tokens in zip(prompts, shares, strict=True) if tokens]

    def finish(self, sequence: Sequence) -> None:
        """Remove the sequence in any status; the caller frees its blocks."""
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
        """The plan for the first paused or waiting sequence; None without one, or without room for it."""
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
