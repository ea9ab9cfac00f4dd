"""Measures all contestants of one size, dtype and number of threads in turns, beside the hardware's roofs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtllm_disagg.errors import EngineError
from trtllm_disagg.tools.bench.child_process import ChildProcess
from trtllm_disagg.tools.bench.engine.contestants import CONTESTANTS, EMBEDDED, EMBEDDED_API, Contestant
from trtllm_disagg.tools.bench.engine.measurement_plan import Case, computed_in
from trtllm_disagg.tools.bench.figures import (
    Bars,
    Column,
    Figure,
    Grid,
    Rounds,
    Sample,
    Section,
    in_turn,
    paired_ratio,
)
from trtllm_disagg.tools.bench.machine import CoreWaits
from trtllm_disagg.tools.bench.models import ITEM_BYTES
from trtllm_disagg.tools.bench.report import Say

PREFILL = "prefill"
LLAMA_CPP = "llama.cpp"
OWN = (EMBEDDED, EMBEDDED_API)
_TOLERATED_WAIT = 0.05
CROWDED = "other processes needed the cores as well"
ROOFS = Contestant("trtllm_disagg.tools.bench.engine.roofs:Roofs")
#: Prompts of a turn, of which the faster one counts: a single prompt is too short.
_PREFILL_TRIES = 2
_AGREEMENT_PROMPTS, _AGREEMENT_TOKENS, _AGREEMENT_LENGTH = 8, 16, 32


def decode_of(batch: int) -> str:
    return f"decode b{batch}"


@dataclass(slots=True)
class Speeds:
    """Results for one case. Values at the same index are of the same round."""

    case: Case
    #: Tokens a second, by contestant and test.
    rates: Rounds = field(default_factory=Rounds)
    #: The roofs, in GB/s and GFLOP/s.
    read: list[float] = field(default_factory=list)
    multiply: list[float] = field(default_factory=list)
    #: Why a peer did not take part.
    absent: dict[str, str] = field(default_factory=dict)
    #: By peer: (greedy answers equal to the embedded engine's, all answers).
    agreeing: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: The share of their time that contestants waited for a core used by other processes; 0 on a calm machine.
    waited: float = 0.0

    @property
    def tests(self) -> list[str]:
        return list(self.rates.values[EMBEDDED])

    @property
    def is_crowded(self) -> bool:
        """Whether targets are not judged: on a crowded machine, an engine with threads that spin loses most."""
        return self.waited > _TOLERATED_WAIT

    def drop(self, peer: str, reason: str) -> None:
        """Removes a peer that failed, with its results."""
        self.absent[peer] = reason
        self.agreeing.pop(peer, None)
        self.rates.values.pop(peer, None)

    def best_peer(self, test: str) -> str | None:
        peers = [name for name in self.rates.subjects if name not in OWN]
        return max(peers, key=lambda name: self.rates.sample(name, test).median, default=None)

    def prefill_share(self) -> Sample:
        """Prefill as percent of the matrix product's rate; attention and the head do not count as work."""
        flops = 2e-9 * self.case.size.layer_parameters
        return paired_ratio(self.rates.values[EMBEDDED][PREFILL], self.multiply, 100 * flops)

    def read_share(self) -> Sample:
        """Decode at batch 1 as percent of the read bandwidth; only weights count as bytes."""
        item = ITEM_BYTES[computed_in(self.case.dtype)]
        gigabytes = 1e-9 * self.case.size.streamed_parameters * item
        return paired_ratio(self.rates.values[EMBEDDED][decode_of(1)], self.read, 100 * gigabytes)


def measure_speeds(case: Case, peers: Sequence[str], say: Say) -> Speeds:
    """Raises EngineError when the embedded engine fails; a peer that fails is reported as absent."""
    speeds = Speeds(case)
    with ExitStack() as stack:
        contest = _Contest(speeds, say, stack)
        contest.start([*OWN, *peers])
        contest.compare_answers()
        contest.measure(-1)  # warms up
        speeds.rates = Rounds()
        waits = CoreWaits(contest.pids)
        for number in range(case.plan.rounds):
            contest.measure(number)
        speeds.waited = waits.share()
    return speeds


def _undisturbed(seconds: Sequence[float]) -> float:
    """A turn's step: the lower quartile, because whatever disturbs a step makes it longer."""
    return float(np.percentile(seconds, 25))


class _Contest:
    """Runs the rounds of one `Speeds`: one contestant works, all others sleep."""

    def __init__(self, speeds: Speeds, say: Say, stack: ExitStack) -> None:
        self._case, self._speeds, self._say, self._stack = speeds.case, speeds, say, stack
        self._remotes: dict[str, ChildProcess] = {}

    @property
    def pids(self) -> list[int]:
        return [remote.pid for remote in (*self._remotes.values(), self._roofs)]

    def start(self, names: Sequence[str]) -> None:
        for name in names:
            contestant = CONTESTANTS[name]
            if reason := contestant.absence(self._case.dtype, self._case.cache):
                self._speeds.absent[name] = reason
                continue
            self._say(f"{self._case.name}: starting {name}")
            with self._forgiven(name):
                self._remotes[name] = self._stack.enter_context(contestant.start(self._case))
        self._roofs = self._stack.enter_context(ROOFS.start(self._case))
        for name, remote in list(self._remotes.items()):
            with self._forgiven(name):
                remote.await_ready()
        self._roofs.await_ready()

    def compare_answers(self) -> None:
        """Counts equal greedy answers, to see that all have the same weights. In bfloat16 some answers differ."""
        count = min(_AGREEMENT_PROMPTS, self._case.plan.largest_batch)
        prompts = self._case.prompts(count, _AGREEMENT_LENGTH, "agreement")
        ours = self._call(EMBEDDED, "generate", prompts, _AGREEMENT_TOKENS)
        for name in [name for name in self._remotes if name != EMBEDDED]:
            with self._forgiven(name):
                theirs = self._call(name, "generate", prompts, _AGREEMENT_TOKENS)
                equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
                self._speeds.agreeing[name] = (equal, len(prompts))

    def measure(self, number: int) -> None:
        """Runs every test once with every contestant; each round begins with another one."""
        round_now = f"round {number + 1} of {self._case.plan.rounds}" if number >= 0 else "warming up"
        read, multiply = self._roofs.call("read"), self._roofs.call("multiply")
        self._roofs.await_sleep()
        if number >= 0:
            self._speeds.read.append(read)
            self._speeds.multiply.append(multiply)
        for test, measure in self._tests(number).items():
            for name in in_turn(list(self._remotes), number):
                self._say(f"{self._case.name}: {round_now}, {test}, {name}")
                with self._forgiven(name):
                    self._speeds.rates.note(name, {test: measure(name)})

    def _tests(self, number: int) -> dict[str, Callable[[str], float]]:
        """By test, a function from a contestant's name to its tokens a second."""
        plan = self._case.plan
        fresh = self._case.prompts(_PREFILL_TRIES, plan.prompt_tokens, f"prefill {number}")

        def prefill(name: str) -> float:
            seconds: list[float] = [self._call(name, "prefill", prompt) for prompt in fresh]
            return plan.prompt_tokens / min(seconds)

        def decode(batch: int) -> Callable[[str], float]:
            prompts = self._case.prompts(batch, plan.decode_prompt, "decode")
            return lambda name: batch / _undisturbed(self._call(name, "decode", prompts, plan.steps))

        return {PREFILL: prefill} | {decode_of(batch): decode(batch) for batch in plan.batches}

    def _call(self, name: str, method: str, *arguments: object) -> Any:
        remote = self._remotes[name]
        answer = remote.call(method, *arguments)
        remote.await_sleep()
        return answer

    @contextmanager
    def _forgiven(self, name: str) -> Iterator[None]:
        """Drops a peer that fails in the block. Raises EngineError if the embedded engine does."""
        try:
            yield
        except EngineError as error:
            if name in OWN:
                raise
            self._speeds.drop(name, str(error))
            # It may still compute, on cores that the others need.
            if (remote := self._remotes.pop(name, None)) is not None:
                remote.close()


def section_of(speeds: Speeds) -> Section:
    name, read, multiply = speeds.case.name, Sample.of(speeds.read).median, Sample.of(speeds.multiply).median
    ratios = (f"{EMBEDDED} / best peer", f"{EMBEDDED_API} / best peer", f"{EMBEDDED} / {LLAMA_CPP}")
    columns = (
        *(Column(each, "tok/s", ".0f") for each in speeds.rates.subjects),
        Column("spread", form=".0%"),
        Column("best peer"),
        *(Column(ratio, "x", ".2f") for ratio in ratios),
    )
    rows = {(test,): _cells(speeds, test) for test in speeds.tests}
    figures = [
        Figure(f"{name} waiting for a core", 100 * speeds.waited, "%"),
        Figure(f"{name} read bandwidth", read, "GB/s"),
        Figure(f"{name} matrix product's rate", multiply, "GFLOP/s"),
        Figure(f"{name} prefill share of the matrix product's rate", speeds.prefill_share().median, "%"),
    ]
    if decode_of(1) in speeds.tests:
        share = speeds.read_share().median
        figures.append(Figure(f"{name} decode b1 share of the read bandwidth", share, "%"))
    figures += [
        Figure(f"{name} greedy answers equal, {peer}", 100 * equal / of, "%")
        for peer, (equal, of) in speeds.agreeing.items()
    ]
    remarks = [f"{peer}: {reason}." for peer, reason in speeds.absent.items()]
    if speeds.is_crowded:
        remarks.append(f"No verdict: {CROWDED}.")
    grid = Grid(f"{name}, tokens a second", ("",), columns, rows, f"{name} {{0}} {{column}}")
    return Section(
        f"{name}, the hardware and the answers",
        [grid],
        remarks,
        figures,
        [
            Bars(
                f"{name}, speed beside {EMBEDDED}'s",
                {name: _heights(speeds, name) for name in speeds.rates.subjects},
            )
        ],
        not_judged_because=CROWDED if speeds.is_crowded else "",
    )


def _cells(speeds: Speeds, test: str) -> dict[str, float | str]:
    rates = speeds.rates
    cells: dict[str, float | str] = {name: rates.sample(name, test).median for name in rates.subjects}
    cells["spread"] = rates.sample(EMBEDDED, test).spread / 2
    if peer := speeds.best_peer(test):
        cells["best peer"] = peer
        cells |= {f"{own} / best peer": rates.ratio(test, own, peer).median for own in OWN if own in cells}
    if test == PREFILL and LLAMA_CPP in cells:
        cells[f"{EMBEDDED} / {LLAMA_CPP}"] = rates.ratio(test, EMBEDDED, LLAMA_CPP).median
    return cells


def _heights(speeds: Speeds, contestant: str) -> dict[str, float]:
    """Rates relative to the embedded engine's, so that prefill and decode fit one axis."""
    own = speeds.rates.medians(EMBEDDED)
    return {test: rate / own[test] for test, rate in speeds.rates.medians(contestant).items()}
