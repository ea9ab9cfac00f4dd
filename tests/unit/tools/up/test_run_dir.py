"""The run directory belongs to one living deployment at a time, and names its processes."""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.commanded_up import worker_config
from trtllm_disagg.common.machine import birth
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.plan import RunDirInUseError
from trtllm_disagg.tools.up.run_dir import ProcessRecord, RunDir, is_alive, read_processes, scratch_directory
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


def test_claim_makes_a_directory_for_this_user_only_and_again_a_key_and_an_empty_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys: set[bytes] = set()
    before = os.umask(0)
    try:
        for _ in range(2):
            run_dir = claimed(Path("deeper/run"))
            assert run_dir.path == tmp_path / "deeper" / "run"
            assert list(run_dir.discovery.iterdir()) == []
            assert json.loads(run_dir.processes_file.read_text()) == []
            assert (run_dir.path / "notes.txt").exists() is bool(keys), "other files stay"
            keys.add((run_dir.path / "key").read_bytes())
            (run_dir.discovery / "stale").mkdir()
            (run_dir.path / "notes.txt").touch()
    finally:
        os.umask(before)
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert (run_dir.path / "key").stat().st_mode & 0o777 == 0o600
    assert [len(key) for key in keys] == [32, 32]


def test_a_claimed_directory_is_locked_against_another_up_and_cleaners_of_temporary_files(
    tmp_path: Path,
) -> None:
    """systemd-tmpfiles passes over a directory with such a lock."""
    run_dir = RunDir.claim(tmp_path)
    with pytest.raises(RunDirInUseError, match=r"--run-dir.*another `up` is starting or stopping there"):
        RunDir.claim(tmp_path)
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run_dir.release()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    claimed(tmp_path)


def test_directory_of_a_live_process_is_refused_and_of_a_zombie_or_a_reused_pid_claimed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    record = record_of(sleeper.pid)
    run_dir = claimed(tmp_path)
    run_dir.write([record])
    assert read_processes(tmp_path) == [record]
    assert is_alive(record)
    assert not list(tmp_path.glob("*.new"))
    with pytest.raises(RunDirInUseError, match=rf"--run-dir.*decode-0 \(pid {sleeper.pid}\)"):
        RunDir.claim(tmp_path)

    run_dir.write([replace(record, born=record.born - 1)])
    claimed(tmp_path).write([record])
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(record)
    assert read_processes(claimed(tmp_path).path) == []


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


@pytest.mark.parametrize(
    "error", [OSError("a request failed"), RuntimeError("unforeseen"), ConfigError("wrong")]
)
def test_a_scratch_directory_is_kept_and_named_after_any_failure_but_a_wrong_setting(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)), scratch_directory("test-") as scratch:
        raise error
    is_kept = not isinstance(error, ConfigError)
    assert scratch.path.is_dir() is is_kept
    assert capsys.readouterr().err == (f"the logs are kept in {scratch.path}\n" if is_kept else "")
    if is_kept:
        scratch.path.rmdir()


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
