"""The run directory belongs to one living deployment at a time, and names its processes."""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.commanded_up import worker_config
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.machine import birth
from trtllm_disagg.tools.up.plan import RunDirInUseError
from trtllm_disagg.tools.up.run_dir import (
    ProcessRecord,
    RunDir,
    is_alive,
    one_change_at_a_time,
    read_processes,
    scratch_directory,
)
from trtllm_disagg.tools.up.status import Status
from trtllm_disagg.tools.up.supervisor import Supervisor


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its stdin is closed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def claimed(path: Path, note: Callable[[str], None] = lambda text: None) -> RunDir:
    """The run directory of a deployment that has ended since."""
    run_dir = RunDir.claim(path, note)
    run_dir.release()
    return run_dir


def record_of(pid: int) -> ProcessRecord:
    return ProcessRecord("decode-0", "decode", pid, {"system": 20001}, "decode-0.log", "ready", birth(pid))


def test_claim_makes_an_empty_process_list_and_a_fresh_discovery_store(tmp_path: Path) -> None:
    stale = claimed(tmp_path / "run").discovery / "stale"
    stale.mkdir()

    run_dir = RunDir.claim(tmp_path / "run")

    assert run_dir.discovery.is_dir()
    assert not stale.exists()
    assert json.loads(run_dir.processes_file.read_text()) == []


def test_claim_makes_the_path_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert RunDir.claim(Path("run")).path == tmp_path / "run"


def test_claim_keeps_unknown_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    RunDir.claim(tmp_path)

    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["discovery", "nats", "traces", "key"])
def test_files_with_the_names_of_a_deployments_in_a_directory_without_one_are_refused_and_stay(
    tmp_path: Path, name: str
) -> None:
    (path := tmp_path / "mine").mkdir(mode=0o700)
    (path / name).mkdir()
    (path / name / "notes.txt").write_text("mine")

    with pytest.raises(ConfigError, match=rf"--run-dir.*would replace {name} there"):
        RunDir.claim(path)

    assert [str(each.relative_to(path)) for each in path.rglob("*")] == [name, f"{name}/notes.txt"]


def test_a_directory_is_its_deployments_also_before_a_process_runs(tmp_path: Path) -> None:
    first = RunDir.claim(tmp_path)
    with pytest.raises(RunDirInUseError, match=r"--run-dir.*another `up` starts or stops there"):
        RunDir.claim(tmp_path)

    first.release()

    assert RunDir.claim(tmp_path).path == tmp_path


def test_claim_makes_a_directory_and_a_key_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run_dir = RunDir.claim(tmp_path / "deeper" / "run")
    finally:
        os.umask(before)

    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert (run_dir.path / "key").stat().st_mode & 0o777 == 0o600


def test_every_deployment_has_a_key_of_its_own(tmp_path: Path) -> None:
    keys = {(claimed(tmp_path).path / "key").read_bytes() for _ in range(2)}

    assert {len(key) for key in keys} == {32}
    assert len(keys) == 2


@pytest.mark.parametrize("used_before", [True, False])
def test_own_or_empty_run_directory_is_closed_to_others_with_a_note(
    tmp_path: Path, used_before: bool
) -> None:
    (path := tmp_path / "run").mkdir()
    if used_before:
        claimed(path)
    path.chmod(0o755)
    notes: list[str] = []

    claimed(path, notes.append)
    claimed(path, notes.append)

    assert path.stat().st_mode & 0o777 == 0o700
    assert notes == [f"{path} was open to other users (mode 755); now it has mode 700"]


def test_an_open_directory_with_other_things_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (path := tmp_path / "shared").mkdir()
    (path / "notes.txt").write_text("of all")
    path.chmod(0o777)

    with pytest.raises(ConfigError, match=f"--run-dir.*chmod 700 {path}"):
        RunDir.claim(path)

    assert [each.name for each in path.iterdir()] == ["notes.txt"]
    assert path.stat().st_mode & 0o777 == 0o777


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "run").mkdir(mode=0o700)
    os.chown(path, 65534, 65534)

    with pytest.raises(ConfigError, match=r"--run-dir.*belongs to uid 65534"):
        RunDir.claim(path)


def test_process_records_are_read_as_written(tmp_path: Path) -> None:
    run_dir = RunDir.claim(tmp_path)
    record = record_of(os.getpid())

    run_dir.write([record])

    assert read_processes(tmp_path) == [record]
    assert [path.name for path in tmp_path.glob("*.new")] == []


def test_run_directory_of_a_live_process_is_refused(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    claimed(tmp_path).write([record_of(sleeper.pid)])

    with pytest.raises(RunDirInUseError, match=rf"--run-dir.*decode-0 \(pid {sleeper.pid}\)"):
        RunDir.claim(tmp_path)


def test_run_directory_of_a_dead_process_is_claimed(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    claimed(tmp_path).write([record_of(sleeper.pid)])
    sleeper.kill()
    sleeper.wait()

    assert read_processes(RunDir.claim(tmp_path).path) == []


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    record = record_of(sleeper.pid)
    assert is_alive(record)

    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)

    assert not is_alive(record)


def test_another_process_with_the_same_pid_is_not_the_recorded_one(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    record = record_of(sleeper.pid)
    claimed(tmp_path).write([replace(record, born=record.born - 1)])

    RunDir.claim(tmp_path)


@pytest.mark.parametrize("content", ["not json", '{"name": 1}', '[{"name": "x"}]'])
def test_a_foreign_process_list_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "processes.json").write_text(content)

    with pytest.raises(ConfigError, match=r"--run-dir.*processes\.json"):
        RunDir.claim(tmp_path)

    assert (tmp_path / "processes.json").read_text() == content


#: As a user with no rights: what of a run directory can be read?
_READ_ALL = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in ("", "key", "processes.json", "discovery"):
    path = os.path.join(sys.argv[1], name)
    try:
        os.listdir(path) if os.path.isdir(path) or not name else open(path).close()
        print(name or "the directory")
    except PermissionError:
        pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_read_nothing_of_it(tmp_path: Path) -> None:
    run_dir = RunDir.claim(tmp_path / "run")
    for parent in run_dir.path.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)

    done = subprocess.run(
        [sys.executable, "-c", _READ_ALL, run_dir.path], capture_output=True, text=True, check=True
    )

    assert done.stdout == ""


def test_a_claimed_directory_is_locked_against_cleaners_of_temporary_files(tmp_path: Path) -> None:
    """As systemd-tmpfiles asks: it passes over a directory with such a lock."""
    run_dir = RunDir.claim(tmp_path)
    with pytest.raises(BlockingIOError):
        lock(tmp_path)
    run_dir.release()
    lock(tmp_path)


def lock(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_a_second_command_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    RunDir.claim(tmp_path).release()
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with one_change_at_a_time(tmp_path, waits.set):
            order.append("second")

    with one_change_at_a_time(tmp_path, waits.set):
        assert not waits.is_set()
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_change_lock_of_a_missing_run_directory_raises_nothing(tmp_path: Path) -> None:
    with one_change_at_a_time(tmp_path / "nowhere", lambda: None):
        pass


@pytest.mark.parametrize("error", [OSError("the demo's request failed"), RuntimeError("unforeseen")])
def test_a_scratch_directory_is_kept_for_its_logs_and_named_after_any_failure(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)), scratch_directory("test-") as scratch:
        raise error
    assert scratch.path.is_dir()
    assert capsys.readouterr().err == f"the logs are kept in {scratch.path}\n"
    scratch.path.rmdir()


def test_a_scratch_directory_is_gone_after_a_wrong_setting() -> None:
    with pytest.raises(ConfigError), scratch_directory("test-") as scratch:
        raise ConfigError("wrong")
    assert not scratch.path.exists()


async def test_discovery_store_replaced_before_the_deployment_is_watched_is_reported(tmp_path: Path) -> None:
    reported = asyncio.Event()

    class Told(Status):
        def note(self, text: str) -> None:
            assert f"{run_dir.discovery} was removed or moved" in text
            reported.set()

    run_dir = claimed(tmp_path / "run")
    supervisor = Supervisor(worker_config(run_dir.path), [], run_dir, Told())
    shutil.rmtree(run_dir.discovery)
    run_dir.discovery.mkdir()
    watching = asyncio.create_task(supervisor.watch())
    try:
        await asyncio.wait_for(reported.wait(), 20)
    finally:
        watching.cancel()
        await supervisor.kill()
