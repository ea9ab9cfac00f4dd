"""What benchmarks/scenarios.py says: has every pair its ratio, is a missed target named, does a table fit?"""

from __future__ import annotations

import pytest

from benchmarks.report import Figure, figures_of
from benchmarks.scenarios import Outcome, report_of
from benchmarks.seed_scenarios import SEED_SCENARIOS
from benchmarks.servers import AS_IN_THE_POST, CONDITIONAL, DISAGG


def outcome_of(throughputs: dict[str, list[float]]) -> Outcome:
    outcome = Outcome("seed", SEED_SCENARIOS[3])
    for mode, values in throughputs.items():
        for value in values:
            times = {
                "wall": 1.0,
                "ttft": 100 / value,
                "ttft_p99": 1.0,
                "itl_p99": 1.0,
                "latency": 200 / value,
            }
            outcome.measured.note(mode, {"throughput": value, **times})
    return outcome


def test_ratios_are_medians_of_neighbours() -> None:
    outcome = outcome_of({"mono-2t": [100.0, 10.0, 100.0], DISAGG: [200.0, 20.0, 150.0]})
    ratios = [outcome.ratio(DISAGG, "mono-2t", column) for column in ("throughput", "ttft", "latency")]
    assert ratios == [2.0, 0.5, 0.5]


def test_every_pair_has_its_ratios_and_the_better_mode_has_the_targets() -> None:
    values = {"mono-2t": [100.0], AS_IN_THE_POST: [50.0], DISAGG: [75.0], CONDITIONAL: [125.0]}
    figures = {figure.figure: figure for figure in figures_of(report_of([outcome_of(values)]))}
    expected = {f"{mode}/mono-2t": values[mode][0] / 100 for mode in (DISAGG, CONDITIONAL)}
    expected |= {f"{mode}/{AS_IN_THE_POST}": values[mode][0] / 50 for mode in (DISAGG, CONDITIONAL)}
    for pair, ratio in expected.items():
        assert figures[f"seed long_prompts throughput {pair}"] == Figure(
            f"seed long_prompts throughput {pair}", ratio, "x"
        )
        assert figures[f"seed long_prompts ttft {pair}"].value == pytest.approx(1 / ratio)
    best = figures["seed long_prompts throughput best disaggregated/mono-post"]
    assert (best.value, best.target, best.ok) == (2.5, ">= 1.62", True)
    ttft = figures["seed long_prompts ttft best disaggregated/mono-post"]
    assert ttft.value == pytest.approx(0.4)
    assert (ttft.target, ttft.ok) == ("<= 0.26", False)
    # Baselines that are better than the post's have no target.
    assert sum(bool(figure.target) for figure in figures.values()) == 2 + 1
