"""How long a process that died waits for its next start, and when it gets none."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Backoff:
    """Seconds: `first`, twice that, and so on to `most`. A process that was ready for `steady` begins anew.

    `attempts` starts in a row that did not get as far as ready are the last.
    """

    first: float = 1.0
    most: float = 30.0
    steady: float = 60.0
    attempts: int = 5


class Deaths:
    """Those of one process."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._in_a_row = 0
        self.failed_starts = 0

    def count(self, ready_seconds: float | None) -> None:
        """One more. `ready_seconds`: how long it had been ready, None when it never was."""
        if ready_seconds is None:
            self.failed_starts += 1
        else:
            self.failed_starts = 0
            if ready_seconds >= self._backoff.steady:
                self._in_a_row = 0
        self._in_a_row += 1

    @property
    def is_hopeless(self) -> bool:
        return self.failed_starts >= self._backoff.attempts

    @property
    def delay(self) -> float:
        """Before the next start."""
        doublings = min(self._in_a_row - 1, 30)
        return min(self._backoff.first * 2.0**doublings, self._backoff.most)


# Whichever of two things happens first.


First = TypeVar("First")
Second = TypeVar("Second")


async def first_of(
    first: Coroutine[Any, Any, First], second: Coroutine[Any, Any, Second], timeout: float | None = None
) -> First | Second | None:
    """The result of the one that ends first, the second one when both did; None after `timeout` seconds.

    The other one is cancelled, and over, before this returns.
    """
    a, b = asyncio.create_task(first), asyncio.create_task(second)
    try:
        await asyncio.wait((a, b), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        a.cancel()
        b.cancel()
        await asyncio.gather(a, b, return_exceptions=True)
    if not b.cancelled():
        return b.result()
    return None if a.cancelled() else a.result()
