"""Detects calls that block the event loop."""

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

#: Maximum wait in one callback of a serving event loop. Calls to an engine, a server or a process take longer; without
#: any, 130 ms were seen with ten processes per core.
LIMIT = 0.25
_NANO = 1e-9
#: A thread waits for the GIL in pieces of this length.
_LOCK_SECONDS = 0.001
#: Total seconds of waits in `may_wait`.
_allowed = [0.0]


@contextlib.asynccontextmanager
async def loop_never_stands_still(limit: float = LIMIT) -> AsyncIterator[None]:
    """Fails if a callback of this event loop blocks for more than `limit` seconds.

    Counts only waits inside a callback, not the effects of a loaded machine: time while the thread computes or has no
    core, another thread has the GIL, the hypervisor runs something else, or a disk is read.
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
        # Measures from here on, and sees the last callback.
        await asyncio.sleep(0)
        try:
            yield
        finally:
            await asyncio.sleep(0)
    assert longest[0] <= limit, f"the event loop waited {longest[0] * 1000:.0f} ms in one call"


@contextlib.contextmanager
def may_wait() -> Iterator[None]:
    """Calls inside may wait: a worker makes them once, before it serves."""
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
    """This thread's use of time so far."""

    clock: float
    #: Seconds in which it ran or was runnable.
    busy: float
    #: Number of waits, and of waits for a disk.
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
        """Seconds waited in calls, less the longest possible waits for the GIL."""
        waits = self.waits - before.waits
        if not waits or self.reads != before.reads:
            return 0.0
        waited = self.clock - before.clock - (self.busy - before.busy)
        return waited - waits * _LOCK_SECONDS
