"""The files of a run: written, read again, and refused when they are none."""

from __future__ import annotations

import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.strategies.records import (
    Arm,
    Parts,
    Plan,
    Point,
    PointResult,
    RequestRecord,
    RunDirectory,
    Sensitivity,
    Workload,
    write_whole,
)

ARM = Arm(
    "1P1D decode_first", "decode_first", prefill_workers=1, decode_workers=1, gpus=2, flags=("--a", "1")
)
POINTS = (Point(ARM.name, "chat", 2.0), Point(ARM.name, "chat", 2.0, sensitivity=Sensitivity(1.5)))
PLAN = Plan("a model", (ARM,), (Workload("chat", "short", 256, 256),), POINTS)
REQUEST = RequestRecord(0.5, 256, 3, 40.0, 20.0, 10.0, (10.0, 10.0), 64, Parts(1, 19, decode=20), session="s")
RESULT = PointResult(POINTS[1], (REQUEST, replace(REQUEST, error="503")), 1.5, {"ttft": 0.01}, 0.25)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.save_plan(PLAN)
    directory.save(RESULT)
    assert directory.plan() == PLAN
    assert list(directory.results()) == [RESULT]
    assert RESULT.answered == (REQUEST,)


def test_points_that_differ_in_anything_have_files_of_their_own() -> None:
    point = POINTS[0]
    others = [
        replace(point, arm="2 agg"),
        replace(point, workload="rag"),
        replace(point, rate=2.5),
        replace(point, repetition=1),
        replace(point, sensitivity=Sensitivity(decode_factor=0.5)),
        replace(point, time_scale=4.0),
    ]
    names = {each.file_name for each in (point, *others)}
    assert len(names) == 7
    assert not any("/" in name or " " in name for name in names)


def test_a_directory_without_a_plan_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run directory.*expected one with plan.json"):
        RunDirectory(tmp_path).plan()


@pytest.mark.parametrize("content", ["no JSON", '{"subject": 1}'])
def test_a_file_of_something_else_is_refused_by_its_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match=r"plan.json"):
        RunDirectory(tmp_path).plan()


def test_a_plan_of_another_version_is_refused(tmp_path: Path) -> None:
    RunDirectory(tmp_path).save_plan(replace(PLAN, version=99))
    with pytest.raises(ConfigError, match=r"version 99.*expected version 1"):
        RunDirectory(tmp_path).plan()


def test_a_directory_in_which_a_run_measures_is_refused_to_another_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with (
        run.claimed(),
        pytest.raises(ConfigError, match=r"--out: .*no other run is measuring"),
        RunDirectory(tmp_path / "run").claimed(),
    ):
        pass
    with run.claimed():
        assert run.path.is_dir()


def test_failed_write_keeps_the_old_record(tmp_path: Path) -> None:
    """As on a full disk: a file may have no more than 100 bytes."""
    file = tmp_path / "report.html"
    write_whole(file, b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_whole(file, bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]
