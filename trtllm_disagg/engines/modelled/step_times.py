"""Durations of a GPU's steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trtllm_disagg.engines.embedded.scheduler.scheduler import Row
from trtllm_disagg.engines.modelled.config import MeasuredSteps


class Factors(NamedTuple):
    """Factors on all step times of prefill and decode."""

    prefill: float = 1.0
    decode: float = 1.0


class Chunk(NamedTuple):
    """A part of a prompt."""

    tokens: int
    #: Prompt tokens that already have KV.
    before: int


class StepParts(NamedTuple):
    """Parts of one step in milliseconds, to be summed."""

    #: All but attention: it treats prefill's and decode's tokens alike.
    shared: float
    prefill_attention: float = 0.0
    decode_attention: float = 0.0

    def seconds(self, prompt_tokens: int, num_decode: int, factors: Factors) -> float:
        """Duration of the step. Scales the shared part by the mean of both factors, weighted by tokens."""
        tokens = prompt_tokens + num_decode
        weight = (prompt_tokens * factors.prefill + num_decode * factors.decode) / tokens
        milliseconds = (
            self.shared * weight
            + self.prefill_attention * factors.prefill
            + self.decode_attention * factors.decode
        )
        return milliseconds / 1000


class StepTimes(Protocol):
    def parts(self, chunks: Sequence[Chunk], num_decode: int, context: int) -> StepParts:
        """The parts of a step with these prompt chunks and `num_decode` sequences with a mean of `context` tokens."""


class StraightLines:
    """`StepTimes` by `MeasuredSteps`' linear times."""

    def __init__(self, measured: MeasuredSteps) -> None:
        self._measured = measured

    def parts(self, chunks: Sequence[Chunk], num_decode: int, context: int) -> StepParts:
        given = self._measured
        prompt_tokens = sum(chunk.tokens for chunk in chunks)
        seen = sum(chunk.tokens * (chunk.before + chunk.tokens / 2) for chunk in chunks)
        linear = prompt_tokens * given.prefill_token_us + num_decode * given.decode_token_us
        return StepParts(
            given.step_ms + linear / 1000,
            seen / 1024 * given.prefill_context_us / 1000,
            num_decode * context / 1024 * given.decode_context_us / 1000,
        )


@dataclass(frozen=True, slots=True)
class StepPricer:
    """Computes the duration of a step from its rows."""

    times: StepTimes
    #: Ranks of attention DP: they take requests in turn, and the slowest ends the step.
    num_ranks: int = 1

    def seconds(self, rows: Sequence[Row], factors: Factors) -> float:
        return max(self._of_rank(own, factors) for own in self._by_rank(rows))

    def _by_rank(self, rows: Sequence[Row]) -> Collection[Sequence[Row]]:
        if self.num_ranks == 1:
            return (rows,)
        ranks: defaultdict[int, list[Row]] = defaultdict(list)
        for row in rows:
            ranks[row.sequence.admission_number % self.num_ranks].append(row)
        return ranks.values()

    def _of_rank(self, rows: Sequence[Row], factors: Factors) -> float:
        # The scheduler puts decode rows first; a chunk may have one token.
        chunks = [Chunk(row.num_tokens, row.num_computed) for row in rows if row.in_prefill]
        contexts = [row.num_computed for row in rows if not row.in_prefill]
        num_decode = len(contexts)
        parts = self.times.parts(chunks, num_decode, round(sum(contexts) / num_decode) if contexts else 0)
        return parts.seconds(sum(chunk.tokens for chunk in chunks), num_decode, factors)
