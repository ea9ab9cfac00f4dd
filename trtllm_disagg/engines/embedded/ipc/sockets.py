"""Unix sockets between processes of one user on this host, and messages on them.

The sockets are files in a directory that only this user may enter. Containers that share the directory share its
sockets, on any network. Both ends also ask the kernel for the peer's user. A process holds a lock beside its socket;
the next listener removes what a killed process left.
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
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from trtllm_disagg.common.machine import ProcessMark, own_mark, require_same_user
from trtllm_disagg.errors import ConfigError

#: Replaces /tmp/trtllm-disagg-UID. Workers that exchange KV need the same directory.
VARIABLE = "TRTLLM_DISAGG_SOCKETS"
#: The kernel limits a socket's path to 107 bytes.
_MAX_BYTES = 60
_EXPECTED = (
    "the absolute path of a directory that belongs to this user, with mode 0700: at most "
    f"{_MAX_BYTES} letters, digits and any of ._/-"
)
_NAME = re.compile(r"[a-z]+-(\d{1,10})-(\d{1,20})-[0-9a-f]{8}", re.ASCII)
_LOCK = ".lock"
#: Linux: seconds, microseconds.
_TIMEVAL = struct.Struct("ll")
#: Bytes that one system call receives of a last message.
AT_ONCE = 1 << 16
#: Bytes of the payload that follows.
LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16
#: The system may grant less. What fits is sent without a thread.
_BUFFER_BYTES = 4 << 20
#: A reader this far behind counts as dead. Answers of thousands of requests fit.
MAX_BACKLOG_BYTES = 1 << 28

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def directory() -> Path:
    """Creates the directory if needed. Raises ConfigError if others may enter it."""
    path = Path(os.environ.get(VARIABLE) or f"/tmp/trtllm-disagg-{os.geteuid()}")
    if not re.fullmatch(rf"/[0-9A-Za-z._/-]{{1,{_MAX_BYTES}}}", str(path), re.ASCII):
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
    """A listening socket; closing it removes its file. Callers check the user of each accepted connection
    (`require_same_user`). Raises ConfigError as `directory` does.
    """

    def __init__(self, purpose: str) -> None:
        """`purpose`: the first word of the file's name."""
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
    """Admits one process at a time, so that a free lock proves that its process has ended."""
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
    # The lock goes last: the next process finds the socket by it.
    for each in (path, f"{path}{_LOCK}"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def is_socket_file(path: str) -> bool:
    """True for the name of a socket in `directory`, whether or not it still exists."""
    where, _, name = path.rpartition("/")
    return where == str(directory()) and _NAME.fullmatch(name) is not None


def has_ended(path: str) -> bool:
    """True if the listener of this socket file has certainly ended, or closed the socket."""
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
        # A signal ends the system call early; Python takes that for success.
        while not _is_connected(connection):
            # Not Python's timeout, with which a full backlog fails at once.
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
    """Also limits connecting."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))


def _timeval(seconds: float) -> bytes:
    """0: no limit."""
    return _TIMEVAL.pack(*divmod(round(seconds * 1e6), 1_000_000))


class UnreadableError(OSError):
    """The received bytes are no message; the connection is then closed."""


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def receive_frame(
    connection: socket.socket,
    *,
    deadline: float | None = None,
    max_bytes: int | None = None,
    begun: bytes = b"",
) -> bytes:
    """Receive one payload; `begun` is the part of its frame that was received before.

    Waits until `deadline` (time.monotonic()), or as the socket's timeout says. Raises TimeoutError, EOFError if the
    peer has closed the connection, and UnreadableError for more than `max_bytes` or a `begun` longer than the frame.
    """
    if len(begun) < LENGTH.size:
        begun = receive_exactly(connection, LENGTH.size, deadline, begun)
    (length,) = LENGTH.unpack_from(begun)
    if max_bytes is not None and length > max_bytes:
        raise UnreadableError(f"message of {length} bytes; at most {max_bytes} are accepted")
    size = LENGTH.size + length
    if len(begun) > size:
        raise UnreadableError(f"{len(begun) - size} bytes behind a message that is the last one")
    return receive_exactly(connection, size, deadline, begun)[LENGTH.size :]


def receive_only_frame(connection: socket.socket, *, seconds: float, max_bytes: int) -> bytes:
    """`receive_frame` for a frame that nothing may follow; a short one takes one system call."""
    deadline = time.monotonic() + seconds
    connection.settimeout(seconds)
    begun = connection.recv(AT_ONCE)
    if not begun:
        raise EOFError("connection closed by the peer")
    return receive_frame(connection, deadline=deadline, max_bytes=max_bytes, begun=begun)


def receive_exactly(
    connection: socket.socket, size: int, deadline: float | None = None, begun: bytes = b""
) -> bytes:
    """`deadline`: on the clock of time.monotonic()."""
    parts = bytearray(begun)
    while len(parts) < size:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("connection closed by the peer")
        parts += part
    return bytes(parts)


class Link(Generic[T]):
    """Messages between the worker and its engine core, in order. `send` is for any thread, `receive` for one.

    It has no thread of its own for them: waking one, and being woken, was half of a request's cost.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        """`decoder` decodes the peer's messages."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._connection = connection
        self._decoder = decoder
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._received = bytearray()
        self._lock = threading.Lock()
        #: Frames that the socket had no room for, for `_sender`.
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._sender: threading.Thread | None = None

    def fileno(self) -> int:
        return self._connection.fileno()

    def wait_up_to(self, seconds: float) -> None:
        """Set how long `receive` waits."""
        # Not settimeout, which adds a poll to each receive and makes `send` wait.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def send(self, message: Any) -> None:
        """Never waits. Drops the message if the peer is gone; closes the connection at MAX_BACKLOG_BYTES unread."""
        content = bytearray(LENGTH.size)
        _encoder.encode_into(message, content, LENGTH.size)
        LENGTH.pack_into(content, 0, len(content) - LENGTH.size)
        frame = memoryview(content)  # an image is copied once
        with self._lock, contextlib.suppress(OSError):
            if not self._backlog:
                frame = frame[self._send_now(frame) :]
            if self._backlog_bytes + len(frame) > MAX_BACKLOG_BYTES:
                self._connection.shutdown(socket.SHUT_RDWR)
            elif frame:
                self._backlog.append(frame)
                self._backlog_bytes += len(frame)
                if len(self._backlog) == 1:
                    self._sender = threading.Thread(
                        target=self._send_backlog, name="link-sender", daemon=True
                    )
                    self._sender.start()

    @property
    def unsent_bytes(self) -> int:
        return self._backlog_bytes

    def flush(self, seconds: float) -> None:
        """Wait up to `seconds` until all messages are sent."""
        with self._lock:  # `send` is starting it
            sender = self._sender
        if sender is not None:
            sender.join(seconds)

    def receive(self, *, wait: bool) -> list[T]:
        """All messages that have arrived. If there are none and `wait` is set, waits as long as `wait_up_to` allows.

        Raises EOFError once the peer is gone and all its messages have been received.
        """
        messages: list[T] = []
        while (count := self._read(0 if wait else socket.MSG_DONTWAIT)) is not None:
            if count == 0 and not messages:
                raise EOFError("the other process is gone")
            self._received += self._chunk[:count]
            self._take_complete(messages)
            if count < _CHUNK_BYTES:
                break
            wait = False
        return messages

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Ends a waiting send or receive too.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, flags: int) -> int | None:
        """Number of bytes read: 0 at the end of the stream, None when nothing came in time."""
        try:
            return self._connection.recv_into(self._chunk, 0, flags)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # the peer closed with data unread
            return 0

    def _take_complete(self, messages: list[T]) -> None:
        """Append the messages that have arrived completely."""
        start, end = 0, len(self._received)
        with memoryview(self._received) as view:
            while end - start >= LENGTH.size:
                first = start + LENGTH.size
                after = first + LENGTH.unpack_from(view, start)[0]
                if after > end:
                    break
                messages.append(self._decoder.decode(view[first:after]))
                start = after
        del self._received[:start]

    def _send_now(self, frame: memoryview) -> int:
        """Number of bytes that the socket accepted without waiting."""
        try:
            return self._connection.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _send_backlog(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._connection.sendall(self._backlog[0])
            with self._lock:
                self._backlog_bytes -= len(self._backlog.popleft())
                if not self._backlog:
                    return


def accept(listener: socket.socket) -> socket.socket:
    """The next connection of this user; closes others'. Raises TimeoutError as the listener does."""
    while True:
        connection, _ = listener.accept()
        try:
            require_same_user(connection)
        except PermissionError:
            connection.close()
        else:
            return connection
