"""A clock where the model would be."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_disagg.embedded.core.engine_core import EngineCore
from trtllm_disagg.embedded.ipc.messages import LogprobEntry, StepReport
from trtllm_disagg.embedded.model.rows import Sampled
from trtllm_disagg.embedded.scheduler.scheduler import Row
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.modelled.clock import Clock
from trtllm_disagg.modelled.factors import FactorSource
from trtllm_disagg.modelled.step_times import StepPricer
from trtllm_disagg.scripted_tokens import checksum, extended, token_after


class Texts:
    """The next token of each sequence: a function of its tokens, so that every order gives the same text."""

    def __init__(self) -> None:
        #: Of those that were in the last step: of how many tokens the checksum is, and the checksum.
        self._sums: dict[Sequence, tuple[int, int]] = {}

    def next_tokens(self, sequences: list[Sequence]) -> list[int]:
        before, self._sums = self._sums, {}
        return [self._next_token(sequence, *before.get(sequence, (0, 0))) for sequence in sequences]

    def _next_token(self, sequence: Sequence, length: int, known: int) -> int:
        tokens = sequence.tokens
        if length != len(tokens):
            # All that follows the prompt are such tokens, but not what a client sends to be continued.
            known = checksum(tokens, sequence.index)
        token = token_after(known)
        self._sums[sequence] = len(tokens) + 1, extended(known, token)
        return token


class ClockedModel:
    """A step ends when it would on the GPU. Work that is there when it ends begins at that very moment, whatever this
    process does in between: what a GPU's host does there, it does beside the GPU.
    """

    def __init__(self, pricer: StepPricer, factors: FactorSource, clock: Clock) -> None:
        self._pricer = pricer
        self._factors = factors
        self._in_force = factors.now()
        self._clock = clock
        self._texts = Texts()
        self._is_idle = True
        #: When the last step ended, and how long it took.
        self.end = 0.0
        self.seconds = 0.0
        #: How late the clock was then: this process was slower than the GPU.
        self.late = 0.0

    def run(self, rows: list[Row]) -> list[Sampled]:
        begin = self.end
        if self._is_idle:
            begin = max(self.end, self._clock.now())
            self._in_force = self._factors.now()
        self.seconds = self._pricer.seconds(rows, self._in_force)
        self.end = begin + self.seconds
        tokens = iter(self._texts.next_tokens([row.sequence for row in rows if row.samples]))
        made = [_certain(row, next(tokens) if row.samples else None) for row in rows if row.num_logits]
        self.late = max(0.0, self._clock.now() - self.end)
        self._clock.wait_until(self.end)
        return made

    def rest(self, is_idle: bool) -> None:
        """After a step: does the next one wait for something?"""
        self._is_idle = is_idle

    def close(self) -> None:
        """It holds nothing."""


def _certain(row: Row, token: int | None) -> Sampled:
    """There is no other token that could have been."""
    wants = token is not None and row.sequence.sampling.logprobs is not None
    of_prompt = [_entry(each) for each in row.scored(token)] if row.num_scored else ()
    return Sampled(token, _entry(token) if token is not None and wants else None, of_prompt)


def _entry(token: int) -> LogprobEntry:
    return [(token, 0.0, 1)]


@dataclass(kw_only=True, eq=False)
class ModelledCore(EngineCore):
    """The engine core, which tells its model when it has nothing to do."""

    model: ClockedModel
    time_scale: float

    def step(self) -> StepReport:
        report = super().step()
        self.model.rest(not self.scheduler.has_runnable)
        for statistics in report.stats:
            statistics["modelled"] = {
                "stepMS": self.model.seconds * 1000,
                "lateMS": self.model.late * 1000,
                "timeScale": self.time_scale,
            }
        return report
