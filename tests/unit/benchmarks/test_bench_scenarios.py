"""benchmarks/scenarios.py: are tokens compared, is the clock read right, does every number reach its place?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import scenarios, servers
from benchmarks.models import NANOGPT, random_checkpoint, vocab_size
from benchmarks.report import Figure
from benchmarks.scenarios import Trace, drive, measures_of, mismatched_tokens
from benchmarks.seed_scenarios import SEED_SCENARIOS, Scenario
from benchmarks.servers import CONDITIONAL, DISAGG, Occupancy, Place
from trtllm_disagg.engines.embedded import SamplingParams

SMOKE = SEED_SCENARIOS[0]


class FakeServer:
    """Answers with the prompt's own numbers. `spoil` changes one answer."""

    def __init__(self, delay: float = 0.0, spoil: Callable[[list[int]], list[int]] = list) -> None:
        self.delay = delay
        self.spoil = spoil
        self.closed = False
        self.seeds: list[int | None] = []

    async def answer(self, prompt: list[int], sampling: SamplingParams) -> AsyncIterator[list[int]]:
        self.seeds.append(sampling.seed)
        tokens = [(prompt[0] + i) % 7 for i in range(sampling.max_tokens or 0)]
        tokens = self.spoil(tokens) if len(self.seeds) == 7 else tokens
        yield tokens[:1]
        for token in tokens[1:]:
            await asyncio.sleep(self.delay)
            yield [token]

    def close(self) -> None:
        self.closed = True


# -- what is run


def test_prompts_differ_between_requests_and_repetitions_but_not_between_modes() -> None:
    first, again, later = (SMOKE.prompts(repetition, 100) for repetition in (0, 0, 1))
    assert first == again
    assert first != later
    assert len({tuple(prompt) for prompt in first + later}) == 8
    assert all(len(prompt) == SMOKE.prompt_tokens for prompt in first)


# -- how it is measured


async def test_each_request_has_its_own_seed_and_comes_when_it_is_due() -> None:
    scenario = Scenario("s", 3, 4, 5, gap=20.0)
    server = FakeServer()
    traces = await drive(server.answer, scenario, scenario.prompts(0, 100))
    assert len(set(server.seeds)) == 3
    assert [trace.arrived for trace in traces] == [0.0, 0.02, 0.04]
    assert all(trace.times[0] >= trace.arrived for trace in traces)
    assert all(len(trace.tokens) == len(trace.times) == 5 for trace in traces)


def test_measures_of_known_times_match_hand_calculation() -> None:
    traces = [
        Trace(arrived=0.0, tokens=[1, 2, 3], times=[0.1, 0.2, 0.4]),
        Trace(arrived=0.5, tokens=[4, 5], times=[0.8, 1.0]),
    ]
    measures = measures_of(traces)
    assert measures["wall"] == 1.0
    assert measures["throughput"] == 5.0
    assert measures["ttft"] == pytest.approx(200)
    assert measures["ttft_p99"] == pytest.approx(100 + 0.99 * 200)
    assert measures["latency"] == pytest.approx(450)
    assert measures["itl_p99"] == pytest.approx(200)


@pytest.mark.parametrize(
    ("tokens", "differing"), [([1, 2, 3], 0), ([1, 9, 3], 1), ([1, 2], 1), ([1, 2, 3, 4], 1), ([2, 3, 1], 3)]
)
def test_every_differing_or_missing_token_counts(tokens: list[int], differing: int) -> None:
    assert mismatched_tokens([Trace(0.0, [1, 2, 3])], [Trace(0.0, tokens)]) == differing


# -- the command, on fake servers


@pytest.fixture
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeServer]:
    servers = {"mono-post": FakeServer(delay=0.004), DISAGG: FakeServer(delay=0.001)}

    def start(bench: Any, modes: list[str], stack: Any) -> dict[str, FakeServer]:
        for server in servers.values():
            stack.callback(server.close)
        return {mode: servers[mode] for mode in modes}

    monkeypatch.setattr(scenarios, "start_servers", start)
    monkeypatch.setattr(scenarios, "two_cores", lambda: (0, 1))
    return servers


def command(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    modes = ["--mode", "mono-post", DISAGG]
    return ["--model", str(tmp_path), *modes, "--repetitions", "2", *more]


def read_figures(text: str) -> dict[str, dict[str, Any]]:
    figures = json.loads(text)
    assert len({figure["figure"] for figure in figures}) == len(figures)
    return {figure["figure"]: figure for figure in figures}


def test_one_wrong_token_is_found_and_is_failure(
    fake_servers: dict[str, FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_servers[DISAGG].spoil = lambda tokens: [*tokens[:-1], tokens[-1] + 1]
    assert scenarios.main(command(tmp_path, "--scenario", "stress", "--json")) == 1
    figures = read_figures(capsys.readouterr().out)
    assert figures["token mismatches"] == Figure("token mismatches", 1, "tokens", "== 0").as_json


# -- the real thing


def test_the_random_model_is_made_once(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "model"
    tiny = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1}
    assert random_checkpoint(directory, NANOGPT | tiny) == directory
    written = (directory / "model.safetensors").stat().st_mtime_ns
    random_checkpoint(directory, NANOGPT | tiny)
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    assert vocab_size(directory) == 64
    random_checkpoint(directory, NANOGPT | tiny | {"num_attention_heads": 2, "num_key_value_heads": 2})
    assert json.loads((directory / "config.json").read_text())["num_attention_heads"] == 2


class WatchedOccupancy(Occupancy):
    """Remembers which engine computed a prompt, and the last one that was made."""

    places: ClassVar[list[Place]] = []
    last: ClassVar[Occupancy]

    def start(self, place: Place, num_tokens: int) -> None:
        self.places.append(place)
        type(self).last = self
        super().start(place, num_tokens)


def test_real_engines_agree_token_by_token(
    checkpoints: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """batch_pressure is where decode computes some of the prompts, and not all."""
    monkeypatch.setattr(servers, "Occupancy", WatchedOccupancy)
    modes = ["mono-post", DISAGG, CONDITIONAL]
    arguments = ["--scenario", "batch_pressure", "--mode", *modes, "--repetitions", "1", "--json"]
    assert scenarios.main(["--model", str(checkpoints("llama")), *arguments]) == 0
    figures = read_figures(capsys.readouterr().out)
    assert figures["token mismatches"]["ok"]
    for mode in modes:
        assert figures[f"seed batch_pressure {mode} throughput"]["value"] > 0
        assert figures[f"seed batch_pressure {mode} ttft"]["value"] > 0
    assert set(WatchedOccupancy.places) == set(Place)
    last = WatchedOccupancy.last
    assert (last.rows, set(last.unfinished.values())) == (0, {0})
