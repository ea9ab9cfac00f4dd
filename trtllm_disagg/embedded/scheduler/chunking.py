"""How a step's prefill budget is shared out: TensorRT-LLM's context chunking policies.

A chunk that does not finish its prompt ends on a multiple of `alignment` tokens from the prompt's start, whatever
the policy: that keeps float32 exact (docs/decisions/0002-tiles.md). It is also the unit that EQUAL_PROGRESS and
FORCE_CHUNK hand out. No prompt overtakes one that waits for room, so none waits for ever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import Protocol

from trtllm_disagg.embedded.params.llm_args import ContextChunkingPolicy, LlmArgs
from trtllm_disagg.embedded.scheduler.sequence import Sequence


class Chunking(Protocol):
    def share(self, prompts: Seq[Sequence], budget: int) -> list[int]:
        """Tokens of this step for each of `prompts`, in order; together at most `budget`."""


class _OneByOne(ABC):
    """Each prompt takes of the budget what the earlier ones left over, up to the first that gets nothing."""

    def share(self, prompts: Seq[Sequence], budget: int) -> list[int]:
        shares = [0] * len(prompts)
        for i, sequence in enumerate(prompts):
            shares[i] = self._cut(sequence, budget)
            if not shares[i]:
                break
            budget -= shares[i]
        return shares

    @abstractmethod
    def _cut(self, sequence: Sequence, budget: int) -> int:
        """Tokens of this prompt for this step, at most `budget`."""


class FirstComeFirstServed(_OneByOne):
    """The first prompt takes all that it can use, then the next one."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment

    def _cut(self, sequence: Sequence, budget: int) -> int:
        left = _left(sequence)
        return left if left <= budget else _aligned(sequence, budget, self._alignment)


class WholePrompts(FirstComeFirstServed):
    """No chunks: a prompt runs in one step, or waits for an emptier one.

    Only a prompt with KV from another engine can be longer than any step. If that KV is lost to preemption,
    the prompt is computed here after all, and then in pieces.
    """

    def __init__(self, max_num_tokens: int, alignment: int) -> None:
        super().__init__(alignment)
        self._max_num_tokens = max_num_tokens

    def _cut(self, sequence: Sequence, budget: int) -> int:
        must_wait = budget < _left(sequence) <= self._max_num_tokens
        return 0 if must_wait else super()._cut(sequence, budget)


class ForceChunk(_OneByOne):
    """One unit for each prompt, even where more would fit: the shortest steps, so the steadiest decoding."""

    def __init__(self, unit: int) -> None:
        self._unit = unit

    def _cut(self, sequence: Sequence, budget: int) -> int:
        tokens = _unit(sequence, 0, self._unit)
        return tokens if tokens <= budget else 0


class EqualProgress:
    """One unit for each prompt in turn, until the budget is used: short prompts are not stuck behind long ones."""

    def __init__(self, unit: int) -> None:
        self._unit = unit

    def share(self, prompts: Seq[Sequence], budget: int) -> list[int]:
        shares = ForceChunk(self._unit).share(prompts, budget)
        budget -= sum(shares)
        growing = [i for i, share in enumerate(shares) if share]
        while growing:
            still = []
            for i in growing:
                tokens = _unit(prompts[i], shares[i], self._unit)
                if 0 < tokens <= budget:
                    shares[i] += tokens
                    budget -= tokens
                    still.append(i)
            growing = still
        return shares


def create_chunking(args: LlmArgs, alignment: int) -> Chunking:
    """Without enable_chunked_prefill no policy applies, as in TensorRT-LLM."""
    if not args.enable_chunked_prefill:
        return WholePrompts(args.max_num_tokens, alignment)
    match args.scheduler_config.context_chunking_policy:
        case ContextChunkingPolicy.EQUAL_PROGRESS:
            return EqualProgress(alignment)
        case ContextChunkingPolicy.FORCE_CHUNK:
            return ForceChunk(alignment)
        case _:
            return FirstComeFirstServed(alignment)


def _left(sequence: Sequence) -> int:
    return sequence.num_prompt - sequence.num_computed


def _aligned(sequence: Sequence, tokens: int, alignment: int) -> int:
    """At most `tokens`, and fewer so that the chunk ends on a multiple."""
    end = sequence.num_computed + tokens
    return max(0, end - end % alignment - sequence.num_computed)


def _unit(sequence: Sequence, taken: int, unit: int) -> int:
    """From `taken` tokens on to the next multiple, or to the prompt's end."""
    start = sequence.num_computed + taken
    return min(sequence.num_prompt, start - start % unit + unit) - start
