"""The run directory, of one user only: logs, the discovery store, the deployment's key, `processes.json` for tools."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trtllm_disagg.admin.keys import KEY_FILE, AdminKey
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.machine import birth
from trtllm_disagg.tools.up.brokers import STORE_DIR
from trtllm_disagg.tools.up.plan import DISCOVERY_DIR, RunDirInUseError
from trtllm_disagg.tracing.trace_file import TRACES_DIR

PROCESSES_FILE = "processes.json"
#: Locked by a command that changes the deployment. The directory itself is locked by its `up`: systemd-tmpfiles removes
#: what is old from /tmp, but nothing of a directory with a lock (tmpfiles.d(5)).
CHANGE_LOCK = "change.lock"
#: The size of a full log. Frontend and workers write one or two kilobytes for each request.
MOST_LOG_BYTES = 64 << 20
#: Between two looks at the discovery store.
_LOOK_SECONDS = 1.0


class ProcessRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `processes.json`. `born` distinguishes a process from a later one with the same pid."""

    name: str
    role: str
    pid: int
    ports: dict[str, int]
    log: str
    state: str
    born: int


@dataclass(frozen=True)
class RunDir:
    path: Path
    #: Has the lock of `claim`, which the end of the process releases, too.
    _held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    @classmethod
    def claim(cls, path: Path, note: Callable[[str], None] = lambda text: None) -> RunDir:
        """Prepare `path` for a new deployment: empty process list and discovery store, and a new key. `note` is called
        when the directory was open to other users before. It is this process's until `release`.

        Raises ConfigError for the directory of a running deployment or of another user, for one with other files that
        is open to other users, and for one with files of others where those of a deployment would be.
        """
        run_dir = cls(path.absolute())
        if os.path.isdir(run_dir.path):
            run_dir._close_to_others(note)
            run_dir._refuse_files_of_others()
        try:
            run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            run_dir._lock()
            run_dir._refuse_if_alive()
            run_dir._clear()
        except OSError as error:
            run_dir.release()
            allowed = f"a directory that can be made and written to ({error.strerror})"
            raise ConfigError.bad_value("--run-dir", str(path), allowed) from error
        except ConfigError:
            run_dir.release()
            raise
        return run_dir

    def release(self) -> None:
        """Another deployment may use the directory."""
        self._held.close()

    def _lock(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._held.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._refuse_if_alive()
            raise self._in_use("another `up` starts or stops there") from None
        except OSError:
            pass  # a file system without locks

    def _clear(self) -> None:
        # The list comes first: from then on `claim` knows the other files as those of a deployment.
        self.write([])
        shutil.rmtree(self.discovery, ignore_errors=True)
        self.discovery.mkdir()
        shutil.rmtree(self.path / STORE_DIR, ignore_errors=True)
        shutil.rmtree(self.path / TRACES_DIR, ignore_errors=True)
        (self.path / TRACES_DIR).mkdir()
        AdminKey.create(self.path / KEY_FILE)
        (self.path / CHANGE_LOCK).touch(0o600)

    def _refuse_files_of_others(self) -> None:
        names = (DISCOVERY_DIR, STORE_DIR, TRACES_DIR, KEY_FILE)
        found = [name for name in names if (self.path / name).exists()]
        if found and not self.processes_file.exists():
            raise ConfigError.bad_value(
                "--run-dir",
                str(self.path),
                f"a directory that is new, empty, or of an earlier `up`; this one has no {PROCESSES_FILE}, and `up` "
                f"would replace {', '.join(found)} there",
            )

    def _close_to_others(self, note: Callable[[str], None]) -> None:
        status = self.path.stat()
        if status.st_uid != os.geteuid():
            raise ConfigError.bad_value(
                "--run-dir", str(self.path), f"a directory of this user; it belongs to uid {status.st_uid}"
            )
        mode = stat.S_IMODE(status.st_mode)
        if not mode & 0o077:
            return
        # Other users may need other files in a directory, so only a run directory is closed.
        if any(self.path.iterdir()) and not self.processes_file.exists():
            raise ConfigError.bad_value(
                "--run-dir",
                str(self.path),
                f"a directory that is new, empty, or closed to other users; this one has mode {mode:o} "
                f"(chmod 700 {self.path})",
            )
        self.path.chmod(0o700)
        note(f"{self.path} was open to other users (mode {mode:o}); now it has mode 700")

    @property
    def discovery(self) -> Path:
        return self.path / DISCOVERY_DIR

    def discovery_in_sight(self) -> Callable[[], Coroutine[None, None, None]]:
        """A function that waits, until `release`, for the discovery store of now to be removed or moved, also with
        another one in its place. Raises FileNotFoundError.
        """
        # While it is open no other directory can get its inode number.
        descriptor = os.open(self.discovery, os.O_PATH | os.O_DIRECTORY)
        self._held.callback(os.close, descriptor)

        async def until_lost() -> None:
            with suppress(FileNotFoundError, NotADirectoryError):
                # Also where inotify has no instance left.
                while os.path.samestat(os.stat(self.discovery), os.fstat(descriptor)):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)

        return until_lost

    @property
    def processes_file(self) -> Path:
        return self.path / PROCESSES_FILE

    def log(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def write(self, records: Iterable[ProcessRecord]) -> None:
        """Replace `processes.json` atomically, so that a reader never sees half of it."""
        draft = self.processes_file.with_suffix(".json.new")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(list(records)), indent=1) + b"\n")
        draft.replace(self.processes_file)

    def _refuse_if_alive(self) -> None:
        alive = [record for record in read_processes(self.path) if is_alive(record)]
        if alive:
            names = ", ".join(f"{record.name} (pid {record.pid})" for record in alive)
            raise self._in_use(f"still running there: {names}")

    def _in_use(self, why: str) -> ConfigError:
        return RunDirInUseError.bad_value(
            "--run-dir", str(self.path), f"a directory that no deployment uses; {why}"
        )


def read_processes(run_dir: Path) -> list[ProcessRecord]:
    """The entries of `processes.json`; none without the file."""
    file = run_dir / PROCESSES_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[ProcessRecord])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError.bad_value(
            "--run-dir", str(run_dir), f"a directory with a {PROCESSES_FILE} that this tool wrote ({error})"
        ) from error


def is_alive(record: ProcessRecord) -> bool:
    return record.born == birth(record.pid) != 0


@contextmanager
def one_change_at_a_time(run_dir: Path, waits: Callable[[], None]) -> Iterator[None]:
    """A lock that lets only one command at a time change the workers of `run_dir`: the steps of two would mix. `waits`
    is called when another command holds the lock. The end of a process releases it.
    """
    try:
        lock = os.open(run_dir / CHANGE_LOCK, os.O_RDWR)
    except OSError:  # the block reports what is wrong with the directory
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def move_to_predecessor(log: Path, most_bytes: int = MOST_LOG_BYTES) -> bool:
    """Copies a full log to its predecessor `NAME.1` and empties it, so it stays short; returns whether it was full. The
    writing process keeps the file open, so the file itself stays; it must have been opened for appending. A line that
    is written between copying and emptying is lost. Raises OSError if the copy fails; `log` stays as it is then.
    """
    if log.stat().st_size < most_bytes:
        return False
    with log.open("r+b") as full, _predecessor(log).open("wb") as old:
        shutil.copyfileobj(full, old, 1 << 20)
        full.truncate(0)
    return True


def forget_predecessor(log: Path) -> None:
    _predecessor(log).unlink(missing_ok=True)


def halves(log: Path) -> list[Path]:
    """The existing ones of predecessor and log, the older one first."""
    return [half for half in (_predecessor(log), log) if half.is_file()]


def _predecessor(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


@dataclass(slots=True)
class Scratch:
    """A temporary directory. It is removed after a success, and kept with its logs after a failure."""

    path: Path
    is_kept: bool = False


@contextmanager
def scratch_directory(prefix: str) -> Iterator[Scratch]:
    """A temporary directory for this user only. It is kept after a failure, for its logs, and named on stderr, but not
    after a wrong setting (then no process was started).
    """
    scratch = Scratch(Path(tempfile.mkdtemp(prefix=prefix)))
    try:
        yield scratch
    except ConfigError:
        raise
    except Exception:
        scratch.is_kept = True
        print(f"the logs are kept in {scratch.path}", file=sys.stderr, flush=True)
        raise
    finally:
        if not scratch.is_kept:
            shutil.rmtree(scratch.path, ignore_errors=True)
