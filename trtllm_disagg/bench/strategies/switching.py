"""Sides of the sensitivity band one after the other in a deployment that runs: which step times were in force when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from trtllm_disagg.bench.strategies.records import Sensitivity

#: Before a point's first request: engines read the factors when they begin after a rest.
_AHEAD_SECONDS = 2.0


@dataclass
class Switching:
    """Of one run of the load generator. `moments`: wall seconds since its first request, by time."""

    moments: Sequence[tuple[float, Sensitivity]]
    set_factors: Callable[[Sensitivity], None]
    #: What was set, and when: nanoseconds since the epoch.
    done: list[tuple[int, Sensitivity]] = field(default_factory=list)

    def begin(self) -> None:
        """Before the load generator is started."""
        self._set(self.moments[0][1])

    async def follow(self, has_begun: Callable[[], Awaitable[None]]) -> None:
        """`has_begun` returns at the first request, or a moment later."""
        if all(sensitivity == self.moments[0][1] for _, sensitivity in self.moments):
            return
        await has_begun()
        origin = time.monotonic()
        for at, sensitivity in self.moments[1:]:
            await asyncio.sleep(max(0.0, origin + at - _AHEAD_SECONDS - time.monotonic()))
            if sensitivity != self.done[-1][1]:
                self._set(sensitivity)

    def _set(self, sensitivity: Sensitivity) -> None:
        self.set_factors(sensitivity)
        self.done.append((time.time_ns(), sensitivity))


def was_in_force(done: Sequence[tuple[int, Sensitivity]], wanted: Sensitivity, begin: int, end: int) -> bool:
    """From the beginning to the end of a point."""
    before = [sensitivity for at, sensitivity in done if at <= begin]
    return before[-1:] == [wanted] and not any(begin < at < end for at, _ in done)
