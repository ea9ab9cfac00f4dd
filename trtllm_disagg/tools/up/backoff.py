"""When a process that has died starts again, and when it is given up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """The delays before a dead process is started again, in seconds: `first`, twice that, and so on up to `most`.

    After `steady` seconds of being ready the delays begin anew. After `attempts` failed starts in a row it is given up.
    """

    first: float = 1.0
    most: float = 30.0
    steady: float = 60.0
    attempts: int = 5


class Deaths:
    """Counts the deaths of one process, from which follow the delay of its next start, and when it is given up."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._in_a_row = 0
        self.failed_starts = 0

    def count(self, ready_seconds: float | None) -> None:
        """Count one more death. `ready_seconds`: how long the process had been ready; None when it never was."""
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
        """Seconds before the next start."""
        doublings = min(self._in_a_row - 1, 30)
        return min(self._backoff.first * 2.0**doublings, self._backoff.most)
