"""Messages between the worker and its engine core: one Unix socket, with no broker in between.

A thread that would send and receive for others has to be woken, and wakes them: half of what a request costs.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from trtllm_disagg.engines.embedded.ipc.framing import LENGTH, framed
from trtllm_disagg.engines.embedded.ipc.socket_files import Listener
from trtllm_disagg.processes.machine import require_same_user

T = TypeVar("T")

_TIMEVAL = struct.Struct("ll")
_CHUNK_BYTES = 1 << 16
#: As much as the system lets us have: what fits is sent without a thread.
_BUFFER_BYTES = 4 << 20
#: A reader this far behind is considered dead. The answers of thousands of requests fit in it.
MOST_BACKLOG_BYTES = 1 << 28

_encoder = msgspec.msgpack.Encoder()


class Link(Generic[T]):
    """Messages in order, each after its length. `send` is for any thread, `receive` for one."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        """`decoder` decodes the other side's messages."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._connection = connection
        self._decoder = decoder
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._received = bytearray()
        self._lock = threading.Lock()
        #: Frames that the socket had no room for; `_sender` sends them.
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._sender: threading.Thread | None = None

    def fileno(self) -> int:
        return self._connection.fileno()

    def wait_at_most(self, seconds: float) -> None:
        """Set how long `receive` waits."""
        whole = int(seconds)
        timeout = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
        # Not settimeout: it adds a poll before each receive, and `send` would wait.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def send(self, message: Any) -> None:
        """Never waits, however slow the other side is. When it is gone, the message is dropped; if it leaves
        MOST_BACKLOG_BYTES unread, the connection is closed.
        """
        frame = framed(_encoder.encode(message))
        with self._lock, contextlib.suppress(OSError):
            if not self._backlog:
                frame = frame[self._send_now(frame) :]
            if self._backlog_bytes + len(frame) > MOST_BACKLOG_BYTES:
                self._connection.shutdown(socket.SHUT_RDWR)
            elif frame:
                self._backlog.append(frame)
                self._backlog_bytes += len(frame)
                if len(self._backlog) == 1:
                    self._sender = threading.Thread(
                        target=self._send_backlog, name="link-sender", daemon=True
                    )
                    self._sender.start()

    def flush(self, seconds: float) -> None:
        """Wait up to `seconds` until all messages are sent."""
        if (sender := self._sender) is not None:
            sender.join(seconds)

    def receive(self, *, wait: bool) -> list[T]:
        """All messages that have arrived. With `wait`, and without any, wait as long as `wait_at_most` allows.

        Raises EOFError when the other side is gone and all its messages have been received.
        """
        messages: list[T] = []
        while (count := self._read(0 if wait else socket.MSG_DONTWAIT)) is not None:
            if count == 0 and not messages:
                raise EOFError("the other process is gone")
            self._received += self._chunk[:count]
            self._take_whole(messages)
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
        except ConnectionResetError:  # the other side closed with data unread
            return 0

    def _take_whole(self, messages: list[T]) -> None:
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

    def _send_now(self, frame: bytes) -> int:
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


def listen() -> tuple[Listener, str]:
    """A socket for `accept`, and its address for `connect`."""
    listener = Listener("core")
    return listener, listener.path


def accept(listener: socket.socket) -> socket.socket:
    """The next connection of a process of this user; others are closed. Raises TimeoutError as the listener does."""
    while True:
        connection, _ = listener.accept()
        try:
            require_same_user(connection)
        except PermissionError:
            connection.close()
        else:
            return connection
