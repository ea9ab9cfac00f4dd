"""Every contestant of one size, dtype and number of threads measured in turns, round after round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_disagg.bench.engine.contestants import CONTESTANTS, EMBEDDED, Contestant
from trtllm_disagg.bench.engine.core_waits import CoreWaits
from trtllm_disagg.bench.engine.plan import Plan, Size
from trtllm_disagg.bench.engine.remote import Remote, Start
from trtllm_disagg.bench.engine.speed import PREFILL, Speeds, decode_of
from trtllm_disagg.errors import EngineError

_ROOFS = Contestant("trtllm_disagg.bench.engine.roofs:Roofs", lambda cache, size, dtype: cache)
#: The better of two prompts is a turn's prefill: a single one is soon over.
_PREFILL_TRIES = 2
_AGREEMENT_PROMPTS, _AGREEMENT_TOKENS, _AGREEMENT_LENGTH = 8, 16, 32


def measure_speeds(
    plan: Plan,
    size: Size,
    dtype: str,
    threads: int,
    peers: Sequence[str],
    cache: Path,
    say: Callable[[str], None],
) -> Speeds:
    """Raises EngineError when the embedded engine fails; a peer that fails is reported as absent."""
    speeds = Speeds(size, dtype, threads)
    with ExitStack() as stack:
        rounds = _Rounds(plan, speeds, cache, say, stack)
        rounds.start([EMBEDDED, *peers])
        rounds.compare_answers()
        rounds.measure(-1)  # warms up
        speeds.rates.clear()
        waits = CoreWaits(rounds.pids)
        for number in range(plan.rounds):
            rounds.measure(number)
        speeds.waited = waits.share()
    return speeds


def _undisturbed(seconds: Sequence[float]) -> float:
    """A turn's step: the lower quartile, because whatever disturbs a step makes it longer."""
    return float(np.percentile(seconds, 25))


class _Rounds:
    """All contestants of one `Speeds`, asleep but for one."""

    def __init__(
        self, plan: Plan, speeds: Speeds, cache: Path, say: Callable[[str], None], stack: ExitStack
    ) -> None:
        self._plan, self._speeds, self._cache, self._say, self._stack = plan, speeds, cache, say, stack
        self._remotes: dict[str, Remote] = {}

    @property
    def pids(self) -> list[int]:
        return [remote.pid for remote in (*self._remotes.values(), self._roofs)]

    def start(self, names: Sequence[str]) -> None:
        for name in names:
            contestant = CONTESTANTS[name]
            if reason := contestant.absence(self._speeds.dtype):
                self._speeds.absent[name] = reason
                continue
            self._say(f"{self._speeds.name}: starting {name}")
            with self._forgiven(name):
                self._remotes[name] = self._connect(contestant)
        self._roofs = self._connect(_ROOFS)
        for name, remote in list(self._remotes.items()):
            with self._forgiven(name):
                remote.await_ready()
        self._roofs.await_ready()

    def compare_answers(self) -> None:
        """Do all have the same weights? In bfloat16 answers part sooner or later."""
        prompts = self._plan.prompts(self._speeds.size, _AGREEMENT_PROMPTS, _AGREEMENT_LENGTH, "agreement")[
            : max(self._plan.batches)
        ]
        ours = self._call(EMBEDDED, "generate", prompts, _AGREEMENT_TOKENS)
        for name in [name for name in self._remotes if name != EMBEDDED]:
            with self._forgiven(name):
                theirs = self._call(name, "generate", prompts, _AGREEMENT_TOKENS)
                equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
                self._speeds.agreeing[name] = (equal, len(prompts))

    def measure(self, number: int) -> None:
        """Every test once, every contestant in turn; who is first changes from round to round."""
        told = f"round {number + 1} of {self._plan.rounds}" if number >= 0 else "warming up"
        read, multiply = self._roofs.call("read"), self._roofs.call("multiply")
        self._roofs.await_sleep()
        if number >= 0:
            self._speeds.read.append(read)
            self._speeds.multiply.append(multiply)
        for test, measure in self._tests(number).items():
            rates = self._speeds.rates.setdefault(test, {name: [] for name in self._remotes})
            order = list(self._remotes)
            first = number % len(order)
            for name in (*order[first:], *order[:first]):
                self._say(f"{self._speeds.name}: {told}, {test}, {name}")
                with self._forgiven(name):
                    rates[name].append(measure(name))

    def _tests(self, number: int) -> dict[str, Callable[[str], float]]:
        """What gives a contestant's tokens a second."""
        plan, size = self._plan, self._speeds.size
        fresh = plan.prompts(size, _PREFILL_TRIES, plan.prompt_tokens, f"prefill {number}")

        def prefill(name: str) -> float:
            seconds: list[float] = [self._call(name, "prefill", prompt) for prompt in fresh]
            return plan.prompt_tokens / min(seconds)

        def decode(batch: int) -> Callable[[str], float]:
            prompts = plan.prompts(size, batch, plan.decode_prompt, "decode")
            return lambda name: batch / _undisturbed(self._call(name, "decode", prompts, plan.steps))

        return {PREFILL: prefill} | {decode_of(batch): decode(batch) for batch in plan.batches}

    # -- the processes

    def _call(self, name: str, method: str, *arguments: object) -> Any:
        remote = self._remotes[name]
        answer = remote.call(method, *arguments)
        remote.await_sleep()
        return answer

    @contextmanager
    def _forgiven(self, name: str) -> Iterator[None]:
        """A peer that fails is out, with all that it did; the embedded engine must not fail."""
        try:
            yield
        except EngineError as error:
            if name == EMBEDDED:
                raise
            self._speeds.drop(name, str(error))
            self._remotes.pop(name, None)

    def _connect(self, contestant: Contestant) -> Remote:
        plan, speeds = self._plan, self._speeds
        start = Start(
            model=str(contestant.checkpoint(self._cache, speeds.size, speeds.dtype)),
            dtype=speeds.dtype,
            threads=speeds.threads,
            vocab_size=speeds.size.vocab_size,
            max_batch=max(plan.batches),
            max_tokens=plan.longest,
        )
        threads = {"OMP_NUM_THREADS": str(speeds.threads)}
        return self._stack.enter_context(Remote(contestant.factory, start, threads | contestant.environment))
