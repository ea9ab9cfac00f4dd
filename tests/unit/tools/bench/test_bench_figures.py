"""The arithmetic that all benchmarks share, and the JSON that they print."""

from __future__ import annotations

import pytest
from scenarios import two_cores

from trtllm_disagg import cli
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.report import Figure, paired_ratios, progress, spread


@pytest.mark.parametrize(
    ("comparison", "value", "bound", "ok"),
    [
        (">=", 1.62, 1.62, True),
        (">=", 1.61, 1.62, False),
        ("<=", 0.26, 0.26, True),
        ("<=", 0.27, 0.26, False),
        ("==", 0, 0, True),
        ("==", 1, 0, False),
    ],
)
def test_a_figure_knows_whether_it_meets_its_target(
    comparison: str, value: float, bound: float, ok: bool
) -> None:
    assert Figure("f", value, "x", f"{comparison} {bound:g}").ok is ok


def test_a_figure_is_written_with_its_target_and_four_digits() -> None:
    assert [Figure("ttft", 12.34567, "ms", "<= 20").as_json, Figure("wall", 2, "s").as_json] == [
        {"figure": "ttft", "value": 12.35, "unit": "ms", "target": "<= 20", "ok": True},
        {"figure": "wall", "value": 2.0, "unit": "s", "target": None, "ok": None},
    ]


def test_the_spread_is_the_distance_of_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(2 / 3)
    assert spread([5.0]) == 0.0
    assert spread([0.0, 0.0]) == 0.0


def test_ratios_are_taken_in_pairs() -> None:
    """A machine that was twice as slow in the second round changes nothing."""
    assert paired_ratios([1.0, 2.0, 1.5], [2.0, 4.0, 3.0]) == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([1.0], [1.0, 2.0])


def test_bench_on_one_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 7, 9})
    assert two_cores() == (3, 7)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    with pytest.raises(ConfigError, match="a core each"):
        two_cores()


def test_progress_goes_to_stderr_a_line_each_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("scenarios") as say:
        say("starting")
        say("measuring")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.partition("] ")[2] for line in captured.err.splitlines()] == ["starting", "measuring"]


@pytest.mark.parametrize("name", ["engine", "transfer", "scenarios"])
def test_benchmark_that_is_gone_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"bench {name} is gone since 0\.2: .*benchmarks/{name}\.py"):
        cli.run(["bench", name, "--quick"])


def test_flag_that_is_gone_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"--plot is gone since 0\.2: .*--json"):
        cli.run(["bench", "overhead", "--plot", "x.png"])
