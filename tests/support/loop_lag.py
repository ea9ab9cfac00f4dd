"""Does the event loop go on, or did a call stop it?"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

#: An event loop that serves requests may wait for so long, in one of its callbacks. A call that waits for an engine, a
#: server or a process takes longer; with ten processes for each core, waits of 130 ms were seen without any.
LIMIT = 0.25
_NANO = 1e-9
#: A thread waits for the interpreter lock in pieces of this length, and asks for it after each.
_LOCK_SECONDS = 0.001
#: Seconds that were waited in `may_wait`, in all.
_allowed = [0.0]


@contextlib.asynccontextmanager
async def loop_never_stands_still(limit: float = LIMIT) -> AsyncIterator[None]:
    """Inside, no callback of this event loop waits for more than `limit` seconds in a call that blocks.

    Only waiting inside a callback counts. Not counted is what a loaded machine does to any test: time in which the
    thread computes or is ready and gets no core, in which another thread has the interpreter lock, in which the
    hypervisor runs something else (nothing was waited for then), and in which a disk is read.
    """
    thread, longest = threading.get_ident(), [0.0]
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:  # a publisher's loop
            run(handle)
            return
        before, allowed = _Spent.now(), _allowed[0]
        run(handle)
        waited = _Spent.now().waited_since(before) - (_allowed[0] - allowed)
        longest[0] = max(longest[0], waited)

    with mock.patch.object(asyncio.Handle, "_run", measured), _lock_waits_in_pieces():
        # What comes is measured from here on, and the callback that has come up to the end is seen.
        await asyncio.sleep(0)
        try:
            yield
        finally:
            await asyncio.sleep(0)
    assert longest[0] <= limit, f"the event loop waited {longest[0] * 1000:.0f} ms in one call"


@contextlib.contextmanager
def may_wait() -> Iterator[None]:
    """What is called inside may wait: a worker does it once, before it serves."""
    before = _Spent.now()
    try:
        yield
    finally:
        _allowed[0] += max(0.0, _Spent.now().waited_since(before))


@contextlib.contextmanager
def _lock_waits_in_pieces() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_LOCK_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@dataclass(frozen=True, slots=True)
class _Spent:
    """Of this thread, so far."""

    clock: float
    #: Seconds in which it has run, or could have.
    busy: float
    #: How often it has waited for something, and how often for a disk.
    waits: int
    reads: int

    @classmethod
    def now(cls) -> _Spent:
        ran, was_ready, _ = Path("/proc/thread-self/schedstat").read_text().split()
        used = resource.getrusage(resource.RUSAGE_THREAD)
        return cls(
            time.monotonic(),
            (int(ran) + int(was_ready)) * _NANO,
            used.ru_nvcsw,
            used.ru_majflt + used.ru_inblock,
        )

    def waited_since(self, before: _Spent) -> float:
        """In calls. Whatever was waited for, so many waits for the interpreter lock could have lasted."""
        waits = self.waits - before.waits
        if not waits or self.reads != before.reads:
            return 0.0
        waited = self.clock - before.clock - (self.busy - before.busy)
        return waited - waits * _LOCK_SECONDS
