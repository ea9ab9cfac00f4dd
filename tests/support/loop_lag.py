"""Does the event loop go on, or did a call stop it?"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator

#: The longest time for which an event loop that serves requests may stand still.
LIMIT = 0.05
_BEAT = 0.005


@contextlib.asynccontextmanager
async def loop_never_stands_still(limit: float = LIMIT) -> AsyncIterator[None]:
    """Inside, the event loop is never held up for more than `limit` seconds.

    A thread that only sleeps measures at the same time by how much the machine itself is late; that is taken off.
    """
    beating = asyncio.create_task(_beat(longest := [0.0]))
    await asyncio.sleep(0)
    with _machine_lag() as machine:
        try:
            yield
        finally:
            # One beat more, so that a call that has held the loop up to here is seen.
            await asyncio.sleep(2 * _BEAT)
            beating.cancel()
    late = longest[0] - machine[0]
    assert late <= limit, f"the event loop stood still for {late * 1000:.0f} ms"


async def _beat(longest: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(_BEAT)
        longest[0] = max(longest[0], time.monotonic() - before - _BEAT)


@contextlib.contextmanager
def _machine_lag() -> Iterator[list[float]]:
    longest, stop = [0.0], threading.Event()

    def sleep() -> None:
        while not stop.is_set():
            before = time.monotonic()
            time.sleep(_BEAT)
            longest[0] = max(longest[0], time.monotonic() - before - _BEAT)

    thread = threading.Thread(target=sleep, name="machine-lag", daemon=True)
    thread.start()
    try:
        yield longest
    finally:
        stop.set()
        thread.join()
