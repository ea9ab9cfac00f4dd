"""What a process reports: its activity, and rate-limited warnings."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

# -- activity: a small file that is replaced atomically. `up` names it in a variable; no token or request costs a write

ACTIVITY_VARIABLE = "TRTLLM_DISAGG_ACTIVITY_FILE"
LOADING = "loading weights"
SERVING, DRAINING = "serving", "draining"
#: Minimum time between two reports of one activity with other numbers.
_SHARE_SECONDS = 0.2


class Activity(msgspec.Struct, frozen=True):
    """What a process does. `percent`: 0 to 100 done; `requests`: number of running requests; None: unknown."""

    doing: str = ""
    percent: int | None = None
    requests: int | None = None

    def __str__(self) -> str:
        if self.requests is not None:
            return f"{self.doing} {self.requests} request" + ("" if self.requests == 1 else "s")
        return self.doing if self.percent is None else f"{self.doing} {self.percent} %"


class Reporter:
    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`file`: None: report nowhere."""
        self._file = file
        self._clock = clock
        self._reported = Activity()
        self._reported_at = 0.0

    def report(self, doing: str, *, percent: int | None = None, requests: int | None = None) -> None:
        """Report the current activity. Never raises: a full disk is no reason to stop serving."""
        activity = Activity(doing, percent, requests)
        is_soon = doing == self._reported.doing and self._clock() - self._reported_at < _SHARE_SECONDS
        if self._file is None or activity == self._reported or is_soon:
            return
        self._reported, self._reported_at = activity, self._clock()
        draft = self._file.with_name(self._file.name + ".new")
        with suppress(OSError):
            draft.write_bytes(msgspec.json.encode(activity))
            draft.replace(self._file)


def reporter_of(environ: Mapping[str, str]) -> Reporter:
    """A reporter to the file named by the environment, if any."""
    file = environ.get(ACTIVITY_VARIABLE)
    return Reporter(Path(file) if file else None)


def read_activity(file: Path) -> Activity:
    """The last reported activity; empty if the file is missing or unreadable."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Activity)
    except (OSError, msgspec.MsgspecError):
        return Activity()


# -- warnings

_WARNING_SECONDS = 60.0


class RateLimitedLog:
    """Logs each message at most once a minute, with the number suppressed. Thread-safe."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        #: Message -> when it may be logged again, and the number suppressed.
        self._messages: dict[str, tuple[float, int]] = {}

    def __call__(self, message: str, *details: object) -> None:
        with self._lock:
            due, left_out = self._messages.get(message, (0.0, 0))
            now = time.monotonic()
            is_due = now >= due
            self._messages[message] = (now + _WARNING_SECONDS, 0) if is_due else (due, left_out + 1)
        if is_due:
            more = f" (and {left_out} more of these in the last minute)" if left_out else ""
            self._log.warning(message + "%s", *details, more)
