"""Whether others took cores that were needed while something was measured."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path


class CoreWaits:
    """From now on, of all threads of the processes `pids`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._ran, self._waited = self._now()

    def share(self) -> float:
        """Of the time in which they would have run, how much they waited for a core: 0 on a calm machine."""
        ran, waited = self._now()
        ran, waited = ran - self._ran, waited - self._waited
        return waited / (ran + waited) if ran + waited else 0.0

    def _now(self) -> tuple[float, float]:
        """Nanoseconds run and waited so far, as the kernel's scheduler counts them."""
        ran = waited = 0
        for pid in self._pids:
            for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    fields = task.read_text().split()
                    ran, waited = ran + int(fields[0]), waited + int(fields[1])
        return ran, waited
