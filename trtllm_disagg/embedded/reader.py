"""Who takes the engine's reports off the link: the event loop that waits for them, and where there is none, a thread.

A thread would have to be woken for every report, and then wake the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections.abc import Callable

from trtllm_disagg.embedded.link import Link
from trtllm_disagg.embedded.messages import Report


class ReportReader:
    """Whoever reads, `deliver` gets every report, in order. When a loop reads, the thread still looks from time to
    time: the loop may be blocked, stopped or closed, and others wait for what it does not take.
    """

    def __init__(self, link: Link[Report], deliver: Callable[[Report], None]) -> None:
        self._link = link
        self._deliver = deliver
        self._reading = threading.Lock()
        self._error: Exception | None = None
        self._switching = threading.Lock()
        self._is_closed = False
        #: The loop that reads, or None; and all that watch the link.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: set[asyncio.AbstractEventLoop] = set()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # -- who reads

    def read_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called in `loop`: it reads from now on, unless another one does."""
        if self._loop is loop or (self._loop is not None and self._loop.is_running()):
            return
        with self._switching, contextlib.suppress(NotImplementedError):  # there are loops that watch no files
            if not self._is_closed:
                loop.add_reader(self._link.fileno(), self._readable, loop)
                self._watching = {loop} | {other for other in self._watching if not other.is_closed()}
                self._loop = loop
                os.eventfd_write(self._wake_fd, 1)

    def read_in_thread(self) -> None:
        """From any thread, before it blocks until there are reports: it may be the loop's."""
        if self._loop is not None:
            self._leave_to_thread()

    def close(self) -> None:
        """The thread has ended. The link is closed when no loop watches it: a loop must not find another file there."""
        with self._switching:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop = None
            os.close(self._wake_fd)
        for loop in list(self._watching):
            if loop.is_running() and loop is not running_loop():
                with contextlib.suppress(RuntimeError):  # it was closed just now
                    loop.call_soon_threadsafe(self._forget, loop)
            else:
                self._forget(loop)
        self._close_unwatched()

    # -- reading

    def wait(self, seconds: float) -> None:
        """In the thread: until there is something to read, and no loop that reads it."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if self._loop is None:
            poll.register(self._link, select.POLLIN)
        if any(fd == self._wake_fd for fd, _ in poll.poll(int(seconds * 1000))):
            os.eventfd_read(self._wake_fd)

    def read(self) -> bool:
        """Whether there was anything. Raises EOFError when the engine is gone, and what the loop that read has met."""
        with self._reading:
            if self._error is not None:
                raise self._error
            reports = self._link.receive(wait=False)
            for report in reports:
                self._deliver(report)
        return bool(reports)

    def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            try:
                self.read()
                return
            except Exception as error:  # the thread knows what to do
                self._error = error
                self._leave_to_thread()
        self._forget(loop)

    def _leave_to_thread(self) -> None:
        with self._switching:
            if not self._is_closed:
                self._loop = None
                os.eventfd_write(self._wake_fd, 1)

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.remove_reader(self._link.fileno())
        self._watching.discard(loop)
        self._close_unwatched()

    def _close_unwatched(self) -> None:
        if self._is_closed and not self._watching:
            self._link.close()


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
