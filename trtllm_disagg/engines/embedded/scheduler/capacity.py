"""TensorRT-LLM's capacity policies: which sequences may start, and their number of KV blocks.

Under every policy, paused sequences go first, in order of admission, and no sequence overtakes the first in line. The
oldest one is paused only if leases or reads hold all blocks that it lacks, and those end by themselves. So every step
advances at least one sequence, and a full KV pool is no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter

from trtllm_disagg.engines.embedded.ipc.messages import Admission
from trtllm_disagg.engines.embedded.kv_cache.block_manager import ROOT, BlockManager
from trtllm_disagg.engines.embedded.kv_cache.memory import PartialReuse, SwapSpace
from trtllm_disagg.engines.embedded.kv_cache.virtual_ids import parts_of, wide_ids
from trtllm_disagg.engines.embedded.params.llm_args import CapacitySchedulerPolicy, LlmArgs
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence, Status
from trtllm_disagg.errors import InvalidRequestError, OverloadedError

_BY_AGE = attrgetter("admission_number")


class Capacity:
    """Applies the policy in the arguments of LLM(...).

    GUARANTEED_NO_EVICT: allocates for the longest possible answer, so a started sequence is never paused.
    STATIC_BATCH: the same, but the next sequences start only when all running ones are done. MAX_UTILIZATION:
    allocates for the known tokens, and one more block on demand; without one, pauses the last admitted sequence.
    """

    def __init__(self, args: LlmArgs, blocks: BlockManager) -> None:
        policy = args.scheduler_config.capacity_scheduler_policy
        self._is_static = policy is CapacitySchedulerPolicy.STATIC_BATCH
        self._pauses = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        self._blocks = blocks
        #: Blocks that resuming a paused sequence must leave free.
        self._spare_to_resume = int(blocks.num_blocks * (1 - args.kv_cache_config.max_util_for_resume))

    def admits(self, num_active: int) -> bool:
        """True if a sequence may start while `num_active` are active."""
        return not (self._is_static and num_active)

    def tokens_to_start(self, sequence: Sequence) -> int:
        """Number of tokens that need blocks at the start."""
        return len(sequence.tokens) if self._pauses else sequence.max_kv_tokens

    def headroom(self, sequence: Sequence, running: Seq[Sequence]) -> int:
        """Blocks that its start must leave for the others' next step, or it would be paused at once."""
        if not self._pauses or not running:
            return 0
        spare = self._spare_to_resume if sequence.status is Status.PAUSED else 0
        return max(spare, sum(map(self._lacks_block, running)))

    def grow(self, running: Seq[Sequence], pause: Callable[[Sequence], None]) -> None:
        """Give every decoding sequence a block for this step, or pause it. `pause` frees blocks and takes the sequence
        out of `running`.
        """
        if not self._pauses:
            return
        for sequence in sorted(filter(self._lacks_block, running), key=_BY_AGE):
            while sequence.status is Status.RUNNING and not self._blocks.can_allocate(1):
                pause(max((s for s in running if not s.is_pinned), key=_BY_AGE))
            if sequence.status is Status.RUNNING:
                sequence.blocks += self._blocks.allocate(1)

    def _lacks_block(self, sequence: Sequence) -> bool:
        return sequence.num_computed >= len(sequence.blocks) * self._blocks.tokens_per_block


def require_room(sequence: Sequence, blocks: BlockManager) -> None:
    """Raise InvalidRequestError if the longest possible answer needs more blocks than the pool has; OverloadedError if
    only quarantined blocks are missing: that passes, and is not the prefill worker's fault.
    """
    size = blocks.tokens_per_block
    wanted, usable = -(-sequence.max_kv_tokens // size), blocks.num_blocks - blocks.num_quarantined
    if wanted <= usable:
        return
    need = (
        f"the prompt ({sequence.num_prompt} tokens) and max_tokens ({sequence.sampling.max_tokens}) "
        f"need {wanted} KV blocks of {size} tokens; the pool has {blocks.num_blocks}"
    )
    if wanted > blocks.num_blocks:
        raise InvalidRequestError(f"{need} (kv_cache_config.max_tokens)")
    raise OverloadedError(f"{need}, of which late transfers may still fill {blocks.num_quarantined}")


@dataclass(slots=True)
class Plan:
    """How a sequence gets its blocks."""

    sequence: Sequence
    keys: list[bytes]
    #: Cached blocks of the prompt's start, and the number of further ones.
    known: list[int]
    wanted: int


class Reservations:
    """Gives sequences their blocks, and takes them back without losing tokens."""

    def __init__(self, blocks: BlockManager, partial: PartialReuse, swap: SwapSpace) -> None:
        self._blocks = blocks
        self._partial = partial
        self.swap = swap

    def plan(self, sequence: Sequence, num_tokens: int, headroom: int) -> Plan | None:
        """Blocks for `num_tokens`, leaving `headroom` for others; None if there are too few now."""
        keys = self._usable_keys(sequence)
        known = self._blocks.match(keys)
        wanted = -(-num_tokens // self._blocks.tokens_per_block) - len(known)
        if not self._blocks.can_allocate(wanted + headroom, besides=known):
            return None
        return Plan(sequence, keys, known, wanted)

    def carry_out(self, plan: Plan) -> None:
        """Give the sequence its blocks, with all cached KV in them."""
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
            missed = -(-sequence.num_prompt // size) - len(plan.known)
            self._blocks.reused_blocks += len(plan.known)
            self._blocks.missed_blocks += missed
            sequence.admission = Admission(plan.wanted, len(plan.known), missed)
        self._restore(sequence, len(plan.known))

    def give_up(self, sequence: Sequence) -> None:
        """Free its blocks. Saves the KV if there is room, else it is recomputed."""
        sequence.saved = self.swap.save(sequence.blocks, sequence.num_computed)
        self._blocks.release(sequence.blocks)
        sequence.blocks, sequence.keys, sequence.num_computed = [], [], 0

    def forget(self, sequence: Sequence) -> None:
        """Free the sequence's saved copy."""
        if sequence.saved is not None:
            self.swap.drop(sequence.saved)
            sequence.saved = None

    def _restore(self, sequence: Sequence, num_known: int) -> None:
        saved = sequence.saved
        if saved is not None:
            self.swap.restore(saved, num_known, sequence.blocks)
            sequence.num_computed = max(sequence.num_computed, saved.num_tokens)
            self.forget(sequence)

    def _usable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the prompt's full blocks with reusable KV."""
        if sequence.prompt_keys is None:
            prompt = sequence.tokens[: sequence.num_prompt]
            sequence.prompt_keys = self._blocks.prompt_keys(prompt, sequence.salt, sequence.images)
        if sequence.has_first_token:
            return sequence.prompt_keys
        return sequence.prompt_keys[: sequence.num_reusable // self._blocks.tokens_per_block]

    def _start(self, plan: Plan) -> Seq[int]:
        """The tokens after the known blocks, if part of another block would save work."""
        sequence, size = plan.sequence, self._blocks.tokens_per_block
        if sequence.saved is not None or sequence.wants_kv:
            return ()
        begin = len(plan.known) * size
        end = min(begin + size, sequence.num_reusable)
        return wide_ids(sequence.tokens[begin:end], parts_of(sequence.images, begin, end))
