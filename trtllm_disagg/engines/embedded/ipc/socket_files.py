"""Unix sockets between processes of one user on this host: files in a directory that no other user may enter.

Containers that share the directory share its sockets, whatever network each of them is on. The kernel also says which
user is at the other end, and both ends ask for it. A socket's process holds a lock beside it: what a killed process has
left is removed when the next one listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.machine import ProcessMark, own_mark, require_same_user

#: Names another directory than /tmp/trtllm-disagg-UID. Workers that exchange KV need the same one.
VARIABLE = "TRTLLM_DISAGG_SOCKETS"
#: The kernel takes 107 bytes for the path of a socket.
_MOST_BYTES = 60
_EXPECTED = (
    "the absolute path of a directory that belongs to this user, with mode 0700: at most "
    f"{_MOST_BYTES} letters, digits and any of ._/-"
)
_NAME = re.compile(r"[a-z]+-(\d{1,10})-(\d{1,20})-[0-9a-f]{8}", re.ASCII)
_LOCK = ".lock"
#: Linux: seconds, microseconds.
_TIMEVAL = struct.Struct("ll")


def directory() -> Path:
    """Made if it is not there. Raises ConfigError for one that is not this user's alone."""
    path = Path(os.environ.get(VARIABLE) or f"/tmp/trtllm-disagg-{os.geteuid()}")
    if not re.fullmatch(rf"/[0-9A-Za-z._/-]{{1,{_MOST_BYTES}}}", str(path), re.ASCII):
        raise ConfigError.bad_value(VARIABLE, str(path), _EXPECTED)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        state = path.lstat()
    except OSError as error:
        raise ConfigError.bad_value(VARIABLE, str(path), f"{_EXPECTED}: {error.strerror}") from None
    is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(state.st_mode) & 0o077:
        found = f"it is {stat.filemode(state.st_mode)}, of uid {state.st_uid}"
        raise ConfigError.bad_value(VARIABLE, str(path), f"{_EXPECTED}: {found}")
    return path


class Listener(socket.socket):
    """A listening socket; its file goes when it is closed. The user of each accepted connection is still to be checked
    (`require_same_user`). Raises ConfigError as `directory` does.
    """

    def __init__(self, purpose: str) -> None:
        """`purpose`: a word that the file's name begins with."""
        where, mark = directory(), own_mark()
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path = str(where / f"{purpose}-{mark.pid}-{mark.started}-{secrets.token_hex(4)}")
        self._lock = -1
        try:
            with _alone_in(where):
                _remove_abandoned(where)
                self._lock = os.open(f"{self.path}{_LOCK}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self.bind(self.path)
            self.listen(128)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1
        super().close()


@contextlib.contextmanager
def _alone_in(where: Path) -> Iterator[None]:
    """One process at a time, so that a lock that is not held means a process that has ended."""
    handle = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_abandoned(where: Path) -> None:
    for lock in where.glob(f"*{_LOCK}"):
        with contextlib.suppress(OSError):
            handle = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(str(lock).removesuffix(_LOCK))
            finally:
                os.close(handle)


def _remove(path: str) -> None:
    # The lock goes last: without it the next process would not find the socket.
    for each in (path, f"{path}{_LOCK}"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def is_socket_file(path: str) -> bool:
    """True for the name of a socket in `directory`, which need not be there any more."""
    where, _, name = path.rpartition("/")
    return where == str(directory()) and _NAME.fullmatch(name) is not None


def has_ended(path: str) -> bool:
    """The process that has listened at this socket file is known to have ended, or to have closed the socket."""
    name = _NAME.fullmatch(path.rpartition("/")[2])
    if name is None:
        return False
    mark = ProcessMark(int(name[1]), int(name[2]))
    return mark == own_mark() or not mark.is_running


def connect(path: str, timeout: float | None = None) -> socket.socket:
    """Raises PermissionError when another user's process listens there, and TimeoutError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end = None if timeout is None else time.monotonic() + timeout
        # A signal ends the system call early, and Python takes that for success.
        while not _is_connected(connection):
            # The socket's own limit: with Python's, a full backlog is an error at once.
            _limit_sends(connection, 0.0 if end is None else max(end - time.monotonic(), 1e-6))
            try:
                connection.connect(path)
            except BlockingIOError:
                raise TimeoutError(f"not accepted for {timeout} s") from None
        _limit_sends(connection, 0.0)
        connection.settimeout(timeout)
        require_same_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _limit_sends(connection: socket.socket, seconds: float) -> None:
    """Connecting counts as sending. 0: no limit."""
    whole, fraction = divmod(round(seconds * 1e6), 1_000_000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(whole, fraction))
