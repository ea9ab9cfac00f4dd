"""A worker that was frozen (SIGSTOP, a paused machine, a closed laptop) for longer than discovery waits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
#: Dynamo's file discovery forgets who has not touched its files for 10 s.
_LONG_SECONDS = 5.0


def _clock() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def watch_for_freezes(thaw: Callable[[], Awaitable[None]], clock: Callable[[], float] = _clock) -> None:
    """Returns never. Calls `thaw` after each freeze that discovery may have taken for a death."""
    while True:
        before = clock()
        await asyncio.sleep(_POLL_SECONDS)
        frozen = clock() - before - _POLL_SECONDS
        if frozen < _LONG_SECONDS:
            continue
        log.warning("this worker was frozen for %.0f s: it tells discovery again that it is there", frozen)
        try:
            await thaw()
        except Exception:
            log.exception("discovery cannot be told; if nobody calls this worker, start it again")
