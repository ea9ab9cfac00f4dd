"""Who may start and how many KV blocks that takes: TensorRT-LLM's capacity policies (facts: trtllm.md section 1).

Whatever the policy: those who were paused go first, in the order in which they were admitted; nobody overtakes the
one who is first in line; and the one admitted longest ago is paused only when all blocks that it lacks are held by a
lease or by a read, which end by themselves. So every step gets somebody further, and there is no deadlock when KV
is full.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import Protocol

from trtllm_disagg.embedded.block_manager import BlockManager
from trtllm_disagg.embedded.llm_args import CapacitySchedulerPolicy, LlmArgs
from trtllm_disagg.embedded.sequence import Sequence, Status

_BY_AGE = attrgetter("order")


class Capacity(Protocol):
    def opens(self, num_active: int) -> bool:
        """May anybody start while so many are active?"""
        ...

    def tokens_to_start(self, sequence: Sequence) -> int:
        """It starts when it has blocks for so many tokens."""
        ...

    def headroom(self, sequence: Sequence, running: Seq[Sequence]) -> int:
        """Blocks that its start must leave to the others."""
        ...

    def grow(self, running: Seq[Sequence], pause: Callable[[Sequence], None]) -> None:
        """Everybody who decodes in this step has a block for it afterwards, or is paused. `pause` frees blocks
        and takes the sequence out of `running`.
        """
        ...


class GuaranteedNoEvict:
    """The blocks of the longest possible answer at once: who has started is never paused."""

    def opens(self, num_active: int) -> bool:
        return True

    def tokens_to_start(self, sequence: Sequence) -> int:
        return sequence.max_kv_tokens

    def headroom(self, sequence: Sequence, running: Seq[Sequence]) -> int:
        return 0

    def grow(self, running: Seq[Sequence], pause: Callable[[Sequence], None]) -> None:
        """They have all that they can ever need."""


class StaticBatch(GuaranteedNoEvict):
    """As many as fit start together; the next ones start when all of these are done."""

    def opens(self, num_active: int) -> bool:
        return not num_active


class MaxUtilization:
    """Blocks for what is known now, and one more whenever it is needed; when there is none, the last one admitted
    is paused.
    """

    def __init__(self, blocks: BlockManager, max_util_for_resume: float) -> None:
        """A paused sequence goes on when at most this fraction of the blocks is used then."""
        self._blocks = blocks
        self._spare_to_resume = int(blocks.num_blocks * (1 - max_util_for_resume))

    def opens(self, num_active: int) -> bool:
        return True

    def tokens_to_start(self, sequence: Sequence) -> int:
        return len(sequence.tokens)

    def headroom(self, sequence: Sequence, running: Seq[Sequence]) -> int:
        """The blocks that the next step takes: else somebody would be paused again at once."""
        if not running:
            return 0
        spare = self._spare_to_resume if sequence.status is Status.PAUSED else 0
        return max(spare, sum(map(self._lacks_block, running)))

    def grow(self, running: Seq[Sequence], pause: Callable[[Sequence], None]) -> None:
        for sequence in sorted(filter(self._lacks_block, running), key=_BY_AGE):
            while sequence.status is Status.RUNNING and not self._blocks.can_allocate(1):
                pause(max((s for s in running if not s.is_pinned), key=_BY_AGE))
            if sequence.status is Status.RUNNING:
                sequence.blocks += self._blocks.allocate(1)

    def _lacks_block(self, sequence: Sequence) -> bool:
        return sequence.num_computed >= len(sequence.blocks) * self._blocks.tokens_per_block


def create_capacity(args: LlmArgs, blocks: BlockManager) -> Capacity:
    match args.scheduler_config.capacity_scheduler_policy:
        case CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            return GuaranteedNoEvict()
        case CapacitySchedulerPolicy.STATIC_BATCH:
            return StaticBatch()
        case CapacitySchedulerPolicy.MAX_UTILIZATION:
            return MaxUtilization(blocks, args.kv_cache_config.max_util_for_resume)
