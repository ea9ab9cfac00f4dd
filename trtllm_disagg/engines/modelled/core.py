"""A modelled engine's core: a clock replaces the model, and tokens do not depend on the order of the steps.

Where the next tokens are held back (`stream_interval`), the process rests while the GPU would compute them, and then
computes these steps together. Each still begins and ends when it would have: a request or KV that arrives meanwhile
waits for the step that runs at that moment, as it would for a GPU's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from trtllm_disagg.engines.embedded.core.engine_core import EngineCore
from trtllm_disagg.engines.embedded.ipc.messages import AddRequest, LogprobEntry, StepReport
from trtllm_disagg.engines.embedded.model.rows import Sampled
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence
from trtllm_disagg.engines.modelled.step_times import Factors, StepPricer
from trtllm_disagg.engines.recording.result import checksum, extended, token_after


class Clock(Protocol):
    def now(self) -> float:
        """Modelled seconds."""
        ...

    def wait_until(self, moment: float) -> None:
        """Returns at once when it has passed."""
        ...


class ScaledClock:
    """This machine's monotonic clock, slower. All engines of a machine with the same scale have the same time."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def now(self) -> float:
        return time.monotonic() / self._scale

    def wait_until(self, moment: float) -> None:
        if (left := moment * self._scale - time.monotonic()) > 0:
            time.sleep(left)


#: In wall seconds; statistics and KV events are never older than this.
_LONGEST_REST = 0.05
#: A shorter rest is not worth going to sleep for.
_SHORTEST_REST = 0.002
#: The process wakes up this much early, because it waits in whole milliseconds.
_EARLY = 0.002


class Texts:
    """The next token of each sequence: a function of its tokens, so that every order gives the same text."""

    def __init__(self) -> None:
        #: For each sequence of the last step: the number of tokens in its checksum, and the checksum.
        self._sums: dict[Sequence, tuple[int, int]] = {}

    def next_tokens(self, sequences: list[Sequence], num_steps: int = 1) -> list[list[int]]:
        """The next `num_steps` tokens of each sequence."""
        before, self._sums = self._sums, {}
        return [self._next(sequence, num_steps, *before.get(sequence, (0, 0))) for sequence in sequences]

    def _next(self, sequence: Sequence, num_steps: int, length: int, known: int) -> list[int]:
        tokens = sequence.tokens
        if length != len(tokens):
            # An answer consists of tokens for which `extended` works; a prompt need not.
            known = checksum(tokens, sequence.index)
        made = []
        for _ in range(num_steps):
            token = token_after(known)
            known = extended(known, token)
            made.append(token)
        self._sums[sequence] = len(tokens) + num_steps, known
        return made


class ClockedModel:
    """A step ends when it would on the GPU. If work is there when it ends, the next step begins at that very moment, no
    matter how long this process takes in between: a GPU's host works beside the GPU.
    """

    def __init__(self, pricer: StepPricer, factors: Factors, clock: Clock) -> None:
        self._pricer = pricer
        self._factors = factors
        self._clock = clock
        self._texts = Texts()
        #: No work is left: the next step begins when work arrives.
        self.is_idle = True
        #: When the last step ended, and how long it took.
        self.end = 0.0
        self.seconds = 0.0
        #: How long after the last step's end this process finished computing it: it was slower than the GPU.
        self.late = 0.0
        #: While steps that began earlier are computed: when the process was due to compute them.
        self.due_at: float | None = None

    def now(self) -> float:
        """The present; while steps are caught up on, the end of the last computed one."""
        return self._clock.now() if self.due_at is None else self.end

    def run(self, rows: list[Row]) -> list[Sampled]:
        begin = self.end
        if self.is_idle:
            begin = max(self.end, self._clock.now())
        self.seconds = self._pricer.seconds(rows, self._factors)
        self.end = begin + self.seconds
        tokens = iter(self._texts.next_tokens([row.sequence for row in rows if row.samples]))
        made = [_certain(row, next(tokens)[0] if row.samples else None) for row in rows if row.num_logits]
        self._wait()
        return made

    def run_on(self, rows: list[Row], most: int, now: float) -> tuple[list[float], list[list[int]]]:
        """Run up to `most` steps in which all rows decode, if they have begun by `now`. Returns the seconds of each
        step, and the tokens of each row.
        """
        seconds: list[float] = []
        steps = self._pricer.decode_steps(rows, self._factors)
        while len(seconds) < most and self.end <= now:
            self.seconds = next(steps)
            self.end += self.seconds
            seconds.append(self.seconds)
        tokens = self._texts.next_tokens([row.sequence for row in rows], len(seconds))
        self._wait()
        return seconds, tokens

    def seconds_of_next(self, sequences: list[Sequence]) -> float:
        """Duration of the next step, in which all sequences decode."""
        return next(self._pricer.decode_steps([Row.of(each, 1) for each in sequences], self._factors))

    def _wait(self) -> None:
        self.late = max(0.0, self._clock.now() - max(self.end, self.due_at or 0.0))
        self._clock.wait_until(self.end)

    def close(self) -> None:
        """Nothing to close."""


def _certain(row: Row, token: int | None) -> Sampled:
    """A sample with a token of probability 1."""
    wants = token is not None and row.sequence.sampling.logprobs is not None
    of_prompt = [_entry(each) for each in row.scored(token)] if row.num_scored else ()
    return Sampled(token, _entry(token) if token is not None and wants else None, of_prompt)


def _entry(token: int) -> LogprobEntry:
    return [(token, 0.0, 1)]


@dataclass(kw_only=True, eq=False)
class ModelledCore(EngineCore):
    """An engine core that tells its model when it is idle, and rests."""

    model: ClockedModel
    #: The present of the modelled GPUs; unlike `model.now` it is never behind.
    wall: Clock
    time_scale: float
    #: A time of `wall`.
    _rests_until: float | None = field(default=None, init=False)
    _caught_up: list[StepReport] = field(default_factory=list, init=False)

    def add(self, request: AddRequest) -> None:
        self._catch_up()
        super().add(request)

    def abort(self, request_id: int) -> None:
        self._catch_up()
        super().abort(request_id)

    def step(self) -> StepReport:
        """Run one step, or all steps that have begun while the process rested."""
        self._catch_up()
        reports, self._caught_up = self._caught_up, []
        return _joined(reports) if reports else super().step()

    def rest(self) -> float:
        """Seconds until the next step with an output for a client begins."""
        silent = self.scheduler.num_silent_steps
        if not silent or self.connector.has_news or self._outbox:
            return 0.0
        now = self.wall.now()
        begins = self.model.end + silent * self.model.seconds_of_next(self.scheduler.running)
        seconds = min(_LONGEST_REST, (begins - now) * self.time_scale - _EARLY)
        if seconds < _SHORTEST_REST:
            return 0.0
        self._rests_until = now + seconds / self.time_scale
        return seconds

    def _catch_up(self) -> None:
        """Compute the steps that have begun during the rest, and wait for the end of the last one."""
        if self._rests_until is None:
            return
        now = self.wall.now()
        self.model.due_at, self._rests_until = min(now, self._rests_until), None
        while self.model.end <= now and self.scheduler.running:
            self._caught_up.append(self._steps(self.model.end, now))
        self.model.due_at = None

    def _run_step(self, started: float) -> StepReport:
        """Run one step, or several when this process is late by more than one."""
        return self._steps(started, self.wall.now() - self.model.seconds)

    def _steps(self, started: float, now: float) -> StepReport:
        """Run the steps without output that have begun by `now`; without any, the next step."""
        is_late = self.model.end <= now and not self.model.is_idle
        if is_late and self.scheduler.reserves_all:
            silent = self.scheduler.num_silent_steps
            if silent > 1:
                return self._silent_steps(silent, now)
        return self._single_step(started)

    def _silent_steps(self, most: int, now: float) -> StepReport:
        """Like up to `most` single steps, for sequences that only decode, have all their blocks and do not end."""
        rows = [Row.of(sequence, 1) for sequence in self.scheduler.running]
        for row in rows:
            row.sequence.timer.scheduled()
        seconds, made = self.model.run_on(rows, most, now)
        for row, tokens in zip(rows, made, strict=True):
            sequence = row.sequence
            sequence.tokens += tokens
            sequence.num_computed += len(tokens)
            sequence.num_unsent += len(tokens)
            if sequence.sampling.logprobs is not None:
                sequence.unsent_logprobs += map(_entry, tokens)
            sequence.timer.has_token()
            self._commit(sequence)
        stats = self.stats.of_decode_steps(rows, self.scheduler, self.blocks, self._handoffs, seconds)
        for statistics, each in zip(stats, seconds, strict=False):
            statistics["modelled"] = self._modelled(each)
        return StepReport(self._take_outputs(), self.num_active, self.events.take(), stats)

    def _single_step(self, started: float) -> StepReport:
        report = super()._run_step(started)
        self.model.is_idle = not self.scheduler.has_runnable
        for statistics in report.stats:
            statistics["modelled"] = self._modelled(self.model.seconds)
        return report

    def _modelled(self, seconds: float) -> dict[str, float]:
        return {
            "stepMS": seconds * 1000,
            "lateMS": self.model.late * 1000,
            "timeScale": self.time_scale,
        }


def _joined(reports: list[StepReport]) -> StepReport:
    return StepReport(
        [output for report in reports for output in report.outputs],
        reports[-1].num_active,
        [event for report in reports for event in report.events],
        [statistics for report in reports for statistics in report.stats],
    )
