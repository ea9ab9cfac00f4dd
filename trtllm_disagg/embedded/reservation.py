"""The blocks of one sequence: what it takes to let it run, and how it gives them up without losing its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from trtllm_disagg.embedded.block_manager import ROOT, BlockManager
from trtllm_disagg.embedded.kv_memory import SwapSpace
from trtllm_disagg.embedded.messages import Admission
from trtllm_disagg.embedded.partial_reuse import PartialReuse
from trtllm_disagg.embedded.sequence import Sequence, Status


@dataclass(slots=True)
class Plan:
    """How a sequence gets its blocks."""

    sequence: Sequence
    keys: list[bytes]
    #: Blocks that hold the start of its prompt already, and how many more it takes.
    known: list[int]
    wanted: int


class Reservations:
    def __init__(self, blocks: BlockManager, partial: PartialReuse, swap: SwapSpace) -> None:
        self._blocks = blocks
        self._partial = partial
        self._swap = swap

    def plan(self, sequence: Sequence, num_tokens: int, headroom: int) -> Plan | None:
        """Blocks for `num_tokens`, with `headroom` more left for others; None when there are not enough now."""
        keys = self._usable_keys(sequence)
        known = self._blocks.match(keys)
        wanted = -(-num_tokens // self._blocks.tokens_per_block) - len(known)
        if not self._blocks.can_allocate(wanted + headroom, besides=known):
            return None
        return Plan(sequence, keys, known, wanted)

    def carry_out(self, plan: Plan) -> None:
        """The sequence has its blocks, and in them all of its KV that could be found."""
        sequence, size = plan.sequence, self._blocks.tokens_per_block
        # Acquire first: otherwise allocating might evict a known block.
        self._blocks.acquire(plan.known)
        parent = plan.keys[len(plan.known) - 1] if plan.known else ROOT
        fresh, num_copied = self._partial.allocate(plan.wanted, parent, self._start(plan), sequence.salt)
        sequence.blocks = plan.known + fresh
        sequence.keys = plan.keys[: len(plan.known)]
        sequence.num_computed = len(plan.known) * size + num_copied
        if sequence.status is Status.WAITING:
            sequence.num_cached = sequence.num_computed
            num_prompt_blocks = -(-sequence.num_prompt // size)
            sequence.admission = Admission(plan.wanted, len(plan.known), num_prompt_blocks - len(plan.known))
        self._restore(sequence, len(plan.known))

    def give_up(self, sequence: Sequence) -> None:
        """Its blocks are free; its KV is put aside, or else computed again."""
        sequence.saved = self._swap.save(sequence.blocks, sequence.num_computed)
        self._blocks.release(sequence.blocks)
        sequence.blocks, sequence.keys, sequence.num_computed = [], [], 0

    def forget(self, sequence: Sequence) -> None:
        """What was put aside is not needed any more."""
        if sequence.saved is not None:
            self._swap.drop(sequence.saved)
            sequence.saved = None

    def _restore(self, sequence: Sequence, num_known: int) -> None:
        saved = sequence.saved
        if saved is not None:
            self._swap.restore(saved, num_known, sequence.blocks)
            sequence.num_computed = max(sequence.num_computed, saved.num_tokens)
            self.forget(sequence)

    def _usable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the prompt's full blocks, as far as their KV is of use."""
        if sequence.prompt_keys is None:
            prompt = sequence.tokens[: sequence.num_prompt]
            sequence.prompt_keys = self._blocks.prompt_keys(prompt, sequence.salt)
        if sequence.has_first_token:
            return sequence.prompt_keys
        # At least one prompt token must be computed to have logits.
        return sequence.prompt_keys[: (sequence.num_prompt - 1) // self._blocks.tokens_per_block]

    def _start(self, plan: Plan) -> Seq[int]:
        """The tokens after the known blocks, where the start of another block would save work."""
        sequence, size = plan.sequence, self._blocks.tokens_per_block
        if sequence.saved is not None or sequence.wants_kv:
            return ()
        begin = len(plan.known) * size
        return sequence.tokens[begin : min(begin + size, sequence.num_prompt - 1)]
