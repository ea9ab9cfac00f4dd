"""The time that the modelled GPU lives in."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Modelled seconds."""
        ...

    def wait_until(self, moment: float) -> None:
        """Returns at once when it has passed."""
        ...


class ScaledClock:
    """This machine's monotonic clock, slower. All engines of a machine with the same scale have the same time."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def now(self) -> float:
        return time.monotonic() / self._scale

    def wait_until(self, moment: float) -> None:
        if (left := moment * self._scale - time.monotonic()) > 0:
            time.sleep(left)
