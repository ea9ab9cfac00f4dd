"""Does the event loop go on, or did a call stop it?"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

#: An event loop that serves requests may wait for 50 ms; the rest is for a shared machine's disk and hypervisor, which
#: no counter tells from a call. The calls in question take seconds.
LIMIT = 0.05 + 0.2
_BEAT = 0.005
_NANO = 1e-9


@contextlib.asynccontextmanager
async def loop_never_stands_still(limit: float = LIMIT) -> AsyncIterator[None]:
    """Inside, no call keeps the event loop waiting for more than `limit` seconds.

    Only waiting counts: time in which the loop's thread computes, or is ready and the machine has no core for it, is
    taken off. So a slow machine fails no test, and neither does a test that computes.
    """
    beating = asyncio.create_task(_beat(longest := [0.0]))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        # One beat more, so that a call that has held the loop up to here is seen.
        await asyncio.sleep(2 * _BEAT)
        beating.cancel()
    assert longest[0] <= limit, f"the event loop waited {longest[0] * 1000:.0f} ms for one call"


async def _beat(longest: list[float]) -> None:
    while True:
        before, busy = time.monotonic(), _busy()
        await asyncio.sleep(_BEAT)
        waited = time.monotonic() - before - (_busy() - busy)
        longest[0] = max(longest[0], waited - _BEAT)


def _busy() -> float:
    """Seconds in which this thread has run, or could have."""
    ran, was_ready, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(was_ready)) * _NANO
