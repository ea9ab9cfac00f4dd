"""The arithmetic that all benchmarks share, and the JSON that they print."""

from __future__ import annotations

import pytest

from benchmarks.http_client import BadAnswerError
from benchmarks.report import Figure, end_program, paired_ratios, progress, spread
from benchmarks.scenarios import two_cores
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.errors import ConfigError


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


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (ConfigError("--rounds"), ExitCode.WRONG_SETTING),
        (BadAnswerError("no end"), "error: no end"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ],
)
def test_a_benchmark_exits_as_a_command_does(raised: BaseException, status: int | str) -> None:
    def fail() -> ExitCode:
        raise raised

    with pytest.raises(SystemExit) as ended:
        end_program(fail)
    assert ended.value.code == status
