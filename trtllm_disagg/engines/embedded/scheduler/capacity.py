"""Which sequences may start and how many KV blocks that takes: TensorRT-LLM's capacity policies.

Under every policy paused sequences go first, in the order of their admission; no sequence overtakes the first in
line; and the one admitted longest ago is paused only when all blocks that it lacks are held by a lease or by a read,
which end by themselves. So every step advances at least one sequence, and a full KV pool is no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter

from trtllm_disagg.engines.embedded.ipc.messages import Admission
from trtllm_disagg.engines.embedded.kv_cache.block_manager import ROOT, BlockManager
from trtllm_disagg.engines.embedded.kv_cache.memory import PartialReuse, SwapSpace
from trtllm_disagg.engines.embedded.params.llm_args import CapacitySchedulerPolicy, LlmArgs
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence, Status
from trtllm_disagg.errors import InvalidRequestError, OverloadedError

_BY_AGE = attrgetter("admission_number")


class Capacity:
    """By the policy that the arguments of LLM(...) name.

    GUARANTEED_NO_EVICT: the blocks of the longest possible answer at once, so a sequence that has started is never
    paused. STATIC_BATCH: the same, and as many as fit start together; the next ones start when all of these are done.
    MAX_UTILIZATION: blocks for what is known now, and one more whenever it is needed; when there is none, the last one
    admitted is paused.
    """

    def __init__(self, args: LlmArgs, blocks: BlockManager) -> None:
        policy = args.scheduler_config.capacity_scheduler_policy
        self._is_static = policy is CapacitySchedulerPolicy.STATIC_BATCH
        self._pauses = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        self._blocks = blocks
        #: A paused sequence goes on when at least so many blocks are left then.
        self._spare_to_resume = int(blocks.num_blocks * (1 - args.kv_cache_config.max_util_for_resume))

    def admits(self, num_active: int) -> bool:
        """Whether a sequence may start while so many are active."""
        return not (self._is_static and num_active)

    def tokens_to_start(self, sequence: Sequence) -> int:
        """It starts when it has blocks for so many tokens."""
        return len(sequence.tokens) if self._pauses else sequence.max_kv_tokens

    def headroom(self, sequence: Sequence, running: Seq[Sequence]) -> int:
        """Blocks that its start must leave to the others: those of the next step, else it would be paused at once."""
        if not self._pauses or not running:
            return 0
        spare = self._spare_to_resume if sequence.status is Status.PAUSED else 0
        return max(spare, sum(map(self._lacks_block, running)))

    def grow(self, running: Seq[Sequence], pause: Callable[[Sequence], None]) -> None:
        """Afterwards every sequence that decodes in this step has a block for it, or is paused. `pause` frees blocks
        and takes the sequence out of `running`.
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
    """Raise InvalidRequestError when the longest possible answer needs more blocks than the pool has; OverloadedError
    when it needs more than are not in quarantine: that is no fault of the prefill worker, and passes.
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
    #: Blocks that hold the start of its prompt already, and how many more it takes.
    known: list[int]
    wanted: int


class Reservations:
    """The blocks of one sequence: what it takes to let it run, and how it gives them up without losing its tokens."""

    def __init__(self, blocks: BlockManager, partial: PartialReuse, swap: SwapSpace) -> None:
        self._blocks = blocks
        self._partial = partial
        self.swap = swap

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
            missed = -(-sequence.num_prompt // size) - len(plan.known)
            self._blocks.reused_blocks += len(plan.known)
            self._blocks.missed_blocks += missed
            sequence.admission = Admission(plan.wanted, len(plan.known), missed)
        self._restore(sequence, len(plan.known))

    def give_up(self, sequence: Sequence) -> None:
        """Free its blocks; its KV is saved if there is room, and else computed again."""
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
        """Keys of the prompt's full blocks, as far as their KV is of use."""
        if sequence.prompt_keys is None:
            prompt = sequence.tokens[: sequence.num_prompt]
            sequence.prompt_keys = self._blocks.prompt_keys(prompt, sequence.salt)
        if sequence.has_first_token:
            return sequence.prompt_keys
        return sequence.prompt_keys[: sequence.num_reusable // self._blocks.tokens_per_block]

    def _start(self, plan: Plan) -> Seq[int]:
        """The tokens after the known blocks, where the start of another block would save work."""
        sequence, size = plan.sequence, self._blocks.tokens_per_block
        if sequence.saved is not None or sequence.wants_kv:
            return ()
        begin = len(plan.known) * size
        return sequence.tokens[begin : min(begin + size, sequence.num_reusable)]
