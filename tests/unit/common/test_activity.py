"""What a process says that it is doing, and what is read of it."""

from pathlib import Path

from tests.support.clock import Clock
from trtllm_disagg.common.reports import ACTIVITY_VARIABLE, Activity, Reporter, read_activity, reporter_of


def test_last_reported_activity_is_read(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.activity"
    reporter = Reporter(file)

    reporter.report("loading weights", percent=43)
    assert str(read_activity(file)) == "loading weights 43 %"

    reporter.report("serving", requests=1)
    assert str(read_activity(file)) == "serving 1 request"
    assert [path.name for path in tmp_path.iterdir()] == ["decode-0.activity"]


def test_progress_writes_are_rate_limited_and_new_activities_are_not(tmp_path: Path) -> None:
    file, clock = tmp_path / "a", Clock(100.0)
    reporter = Reporter(file, clock)

    reporter.report("loading weights", percent=1)
    reporter.report("loading weights", percent=2)
    assert read_activity(file).percent == 1

    clock.now += 0.3
    reporter.report("loading weights", percent=3)
    assert read_activity(file).percent == 3

    reporter.report("warming up")
    assert str(read_activity(file)) == "warming up"


def test_missing_or_invalid_activity_file_reads_as_no_activity(tmp_path: Path) -> None:
    file = tmp_path / "a"
    assert read_activity(file) == Activity()

    Reporter(tmp_path / "gone" / "a").report("serving")
    file.write_text("half of")
    assert read_activity(file) == Activity()


def test_without_a_file_in_the_environment_there_is_no_reader(tmp_path: Path) -> None:
    assert type(reporter_of({})) is Reporter

    reporter_of({ACTIVITY_VARIABLE: str(tmp_path / "a")}).report("serving")
    assert str(read_activity(tmp_path / "a")) == "serving"
