"""Who runs in the next step: every decode row first, then prefill chunks with what is left of the token budget.

GUARANTEED_NO_EVICT: a sequence is admitted when the KV blocks of its longest possible answer are available, and
keeps them to its end; so running sequences never wait for blocks, and there is no deadlock when KV is full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_disagg.embedded.block_manager import BlockManager
from trtllm_disagg.embedded.sequence import Sequence, Status


@dataclass(slots=True)
class Row:
    """`num_tokens` of this sequence go through the model in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def tokens(self) -> list[int]:
        sequence = self.sequence
        return sequence.tokens[sequence.num_computed : sequence.num_computed + self.num_tokens]

    @property
    def samples(self) -> bool:
        """Only a row that reaches the end of what is known yields a token; a partial prefill does not."""
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.tokens)


@dataclass(slots=True)
class Counts:
    """Since the start."""

    admitted: int = 0
    finished: int = 0
    #: How long the admitted ones had waited, all together.
    queued_seconds: float = 0.0


class Scheduler:
    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        chunk_alignment: int,
        chunked: bool,
        by_priority: bool = False,
    ) -> None:
        """`chunk_alignment`: a prefill chunk that does not finish its prompt ends on a multiple of it (tokens)."""
        self._blocks = blocks
        # Every decode row takes a token of the budget, in every step.
        self._max_active = min(max_batch_size, max_num_tokens)
        self._max_num_tokens = max_num_tokens
        self._alignment = chunk_alignment
        self._chunked = chunked
        self._by_priority = by_priority
        self.counts = Counts()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.receiving: set[Sequence] = set()

    @property
    def has_runnable(self) -> bool:
        """False when nothing can run before someone else frees blocks: a lease that ends, a pull that finishes."""
        return bool(self.running) or self._can_admit()

    @property
    def num_active(self) -> int:
        return len(self.running) + len(self.receiving)

    def add(self, sequence: Sequence) -> None:
        """First come first served; by priority when told so, and then among equals."""
        place = len(self.waiting)
        while self._by_priority and place and self.waiting[place - 1].priority < sequence.priority:
            place -= 1
        self.waiting.insert(place, sequence)

    def admit(self) -> Iterator[Sequence]:
        """Move waiting sequences in, first ones first, while there is room.

        Yields those that want their KV pulled.
        """
        while self._can_admit():
            sequence = self.waiting.popleft()
            self._reserve(sequence)
            self.counts.admitted += 1
            self.counts.queued_seconds += time.monotonic() - sequence.arrived
            if sequence.handle is not None:
                sequence.status = Status.RECEIVING
                self.receiving.add(sequence)
                yield sequence
            else:
                sequence.status = Status.RUNNING
                self.running.append(sequence)

    def received(self, sequence: Sequence) -> None:
        """The KV of a generation_only sequence is here: it decodes from token two on."""
        self.receiving.discard(sequence)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def schedule(self) -> list[Row]:
        decode = [s for s in self.running if not s.in_prefill]
        rows = [Row(s, 1) for s in decode]
        budget = self._max_num_tokens - len(rows)
        for sequence in self.running:
            if sequence.in_prefill:
                tokens = self._chunk(sequence, budget)
                if not tokens:
                    break  # nobody overtakes a prompt that waits for room
                rows.append(Row(sequence, tokens))
                budget -= tokens
        return rows

    def finish(self, sequence: Sequence) -> None:
        """It is done, whatever it was doing; its blocks stay with the caller."""
        self.counts.finished += 1
        match sequence.status:
            case Status.WAITING:
                self.waiting.remove(sequence)
            case Status.RUNNING:
                self.running.remove(sequence)
            case Status.RECEIVING:
                self.receiving.remove(sequence)
        sequence.status = Status.FINISHED

    def find(self, request_id: int) -> list[Sequence]:
        everyone = (*self.waiting, *self.running, *self.receiving)
        return [s for s in everyone if s.request_id == request_id]

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        left = sequence.num_prompt - sequence.num_computed
        if left <= budget:
            return left
        if not self._chunked:
            return 0
        end = sequence.num_computed + budget
        return max(0, end - end % self._alignment - sequence.num_computed)

    def _can_admit(self) -> bool:
        if not self.waiting or self.num_active >= self._max_active:
            return False
        known, wanted = self._needs(self.waiting[0])
        return self._blocks.can_allocate(wanted, besides=known)

    def _reserve(self, sequence: Sequence) -> None:
        known, wanted = self._needs(sequence)
        # Acquire first: otherwise allocating might evict a known block.
        self._blocks.acquire(known)
        sequence.blocks = known + self._blocks.allocate(wanted)
        sequence.keys = self._prompt_keys(sequence)[: len(known)]
        sequence.num_computed = len(known) * self._blocks.tokens_per_block
        sequence.num_cached = sequence.num_computed

    def _needs(self, sequence: Sequence) -> tuple[list[int], int]:
        """Its blocks that are known already, and how many more its longest possible answer takes."""
        size, keys = self._blocks.tokens_per_block, self._prompt_keys(sequence)
        # At least one prompt token must be computed to have logits, unless prefill did it elsewhere.
        usable = keys if sequence.handle is not None else keys[: (sequence.num_prompt - 1) // size]
        known = self._blocks.match(usable)
        return known, -(-sequence.max_kv_tokens // size) - len(known)

    def _prompt_keys(self, sequence: Sequence) -> list[bytes]:
        if sequence.prompt_keys is None:
            prompt = sequence.tokens[: sequence.num_prompt]
            sequence.prompt_keys = self._blocks.prompt_keys(prompt, sequence.salt)
        return sequence.prompt_keys
