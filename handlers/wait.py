"""A wait that something else than its own task can end."""

from __future__ import annotations

import asyncio
from typing import Any


class Wait:
    """Begun and rested from as often as one likes: no task and no timer for each, which would cost 5 us a token."""

    def __init__(self) -> None:
        self._waiting: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._was_ended = False

    @property
    def is_on(self) -> bool:
        return self._waiting is not None

    def begin(self) -> None:
        """From now on the current task waits, until `rest`."""
        task = self._waiting = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()

    def rest(self) -> None:
        self._waiting = None

    def end(self) -> None:
        if self._waiting is not None and not self._was_ended:
            self._was_ended = True
            self._waiting.cancel()

    def was_ended(self, error: BaseException | None) -> bool:
        """Whether `error`, which ends the wait, comes of `end`, and of nothing else: the task may have been cancelled
        at the same time, and that comes first.
        """
        task = self._waiting
        if not self._was_ended or task is None or not isinstance(error, asyncio.CancelledError):
            return False
        return task.uncancel() <= self._cancelling
