"""The run directory, private to its user: logs, discovery store, the deployment's key, and `processes.json`."""

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
from trtllm_disagg.common.machine import birth
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.brokers import STORE_DIR
from trtllm_disagg.tools.up.plan import DISCOVERY_DIR, RunDirInUseError
from trtllm_disagg.tracing.trace_file import TRACES_DIR

PROCESSES_FILE = "processes.json"
#: Max size of a log. Frontend and workers write 1 to 2 KB per request.
MAX_LOG_BYTES = 64 << 20
#: Time between two looks at the discovery store.
_LOOK_SECONDS = 1.0


class ProcessRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `processes.json`. `born` tells a process from a later one with its pid."""

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
    #: Holds the lock of `claim` until the process ends.
    _held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    @classmethod
    def claim(cls, path: Path, note: Callable[[str], None] = lambda text: None) -> RunDir:
        """Prepares `path` for a new deployment: empty process list and discovery store, and a new key. Calls `note` if
        other users could open the directory. This process owns it until `release`.

        Raises ConfigError for the directory of a running deployment or another user, and for one with foreign files
        that is open to others or where a deployment's files would be.
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
            raise _wrong(path, f"a directory that can be made and written to ({error.strerror})") from error
        except ConfigError:
            run_dir.release()
            raise
        return run_dir

    def release(self) -> None:
        """Lets another deployment use the directory."""
        self._held.close()

    def _lock(self) -> None:
        """Also keeps systemd-tmpfiles from cleaning a directory in /tmp (tmpfiles.d(5))."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._held.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._refuse_if_alive()
            raise self._in_use("another `up` is starting or stopping there") from None
        except OSError:
            pass  # a file system without locks

    def _clear(self) -> None:
        # The list comes first: with it, `claim` recognises the other files.
        self.write([])
        shutil.rmtree(self.discovery, ignore_errors=True)
        self.discovery.mkdir()
        shutil.rmtree(self.path / STORE_DIR, ignore_errors=True)
        shutil.rmtree(self.path / TRACES_DIR, ignore_errors=True)
        (self.path / TRACES_DIR).mkdir()
        AdminKey.create(self.path / KEY_FILE)

    def _refuse_files_of_others(self) -> None:
        names = (DISCOVERY_DIR, STORE_DIR, TRACES_DIR, KEY_FILE)
        found = [name for name in names if (self.path / name).exists()]
        if found and not self.processes_file.exists():
            raise _wrong(
                self.path,
                f"a directory that is new, empty, or of an earlier `up`; this one has no {PROCESSES_FILE}, and `up` "
                f"would replace {', '.join(found)} there",
            )

    def _close_to_others(self, note: Callable[[str], None]) -> None:
        status = self.path.stat()
        if status.st_uid != os.geteuid():
            raise _wrong(self.path, f"a directory of this user; it belongs to uid {status.st_uid}")
        mode = stat.S_IMODE(status.st_mode)
        if not mode & 0o077:
            return
        # Only a run directory is closed: other users may need a directory with other files.
        if any(self.path.iterdir()) and not self.processes_file.exists():
            allowed = f"a directory that is new, empty, or closed to other users; this one has mode {mode:o}"
            raise _wrong(self.path, f"{allowed} (chmod 700 {self.path})")
        self.path.chmod(0o700)
        note(f"{self.path} was open to other users (mode {mode:o}); now it has mode 700")

    @property
    def discovery(self) -> Path:
        return self.path / DISCOVERY_DIR

    def discovery_in_sight(self) -> Callable[[], Coroutine[None, None, None]]:
        """Returns a function that waits, until `release`, for the discovery store to be removed, moved or replaced.
        Raises FileNotFoundError.
        """
        # While it is open, no other directory gets its inode number.
        descriptor = os.open(self.discovery, os.O_PATH | os.O_DIRECTORY)
        self._held.callback(os.close, descriptor)

        async def until_lost() -> None:
            with suppress(FileNotFoundError, NotADirectoryError):
                # Works even when inotify has no instance left.
                while os.path.samestat(os.stat(self.discovery), os.fstat(descriptor)):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)

        return until_lost

    @property
    def processes_file(self) -> Path:
        return self.path / PROCESSES_FILE

    def log(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def write(self, records: Iterable[ProcessRecord]) -> None:
        replace_json(self.processes_file, list(records))

    def _refuse_if_alive(self) -> None:
        alive = [record for record in read_processes(self.path) if is_alive(record)]
        if alive:
            names = ", ".join(f"{record.name} (pid {record.pid})" for record in alive)
            raise self._in_use(f"still running there: {names}")

    def _in_use(self, why: str) -> ConfigError:
        return _wrong(self.path, f"a directory that no deployment uses; {why}", RunDirInUseError)


def _wrong(run_dir: Path, allowed: str, error: type[ConfigError] = ConfigError) -> ConfigError:
    return error.bad_value("--run-dir", str(run_dir), allowed)


def replace_json(file: Path, content: object) -> None:
    """Replaces the file atomically. Raises OSError."""
    draft = file.with_suffix(".json.new")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    draft.replace(file)


def read_processes(run_dir: Path) -> list[ProcessRecord]:
    """The entries of `processes.json`; empty without the file."""
    file = run_dir / PROCESSES_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[ProcessRecord])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise _wrong(
            run_dir, f"a directory with a {PROCESSES_FILE} that this tool wrote ({error})"
        ) from error


def is_alive(record: ProcessRecord) -> bool:
    return record.born == birth(record.pid) != 0


def unlist(discovery: Path, instance: str) -> None:
    """Removes a dead worker's instance (hexadecimal) and model cards from file discovery. Until its lease ended, a
    frontend would otherwise keep choosing it, perhaps as the only one of its revision.
    """
    for file in discovery.glob(f"v1/*/*%2F{instance}"):
        file.unlink(missing_ok=True)


def move_to_predecessor(log: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Copies a full log to `NAME.1` and empties it; returns whether it was full. The writer keeps the file open, so it
    must append. A line written between copy and truncation is lost. Raises OSError if the copy fails, and leaves `log`
    as it is.
    """
    if log.stat().st_size < max_bytes:
        return False
    with log.open("r+b") as full, _predecessor(log).open("wb") as old:
        shutil.copyfileobj(full, old, 1 << 20)
        full.truncate(0)
    return True


def forget_predecessor(log: Path) -> None:
    _predecessor(log).unlink(missing_ok=True)


def halves(log: Path) -> list[Path]:
    """The existing predecessor and log, the older first."""
    return [half for half in (_predecessor(log), log) if half.is_file()]


def _predecessor(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


@dataclass(slots=True)
class Scratch:
    """A temporary directory, removed after a success and kept with its logs after a failure."""

    path: Path
    is_kept: bool = False


@contextmanager
def scratch_directory(prefix: str) -> Iterator[Scratch]:
    """A private temporary directory. A failure keeps it for its logs and names it on stderr; a wrong setting does not,
    as no process started.
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
