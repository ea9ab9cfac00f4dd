"""What a process is doing, told to the program that started it: a small file, replaced in one step.

`up` names the file in an environment variable, and the engine core inherits it from its worker: while the engine
loads, the core tells, and afterwards the worker does. Nothing is written for a token or a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

ACTIVITY_VARIABLE = "TRTLLM_DISAGG_ACTIVITY_FILE"
LOADING = "loading weights"
SERVING, DRAINING = "serving", "draining"
#: A share that grows, or a number of requests, is written so often at most.
_SHARE_SECONDS = 0.2


class Activity(msgspec.Struct, frozen=True):
    """`percent` is how much of it is done, 0 to 100, and `requests` how many run, where that is known."""

    doing: str = ""
    percent: int | None = None
    requests: int | None = None

    def __str__(self) -> str:
        if self.requests is not None:
            return f"{self.doing} {self.requests} request" + ("" if self.requests == 1 else "s")
        return self.doing if self.percent is None else f"{self.doing} {self.percent} %"


class Reporter:
    """As it is, there is no reader."""

    def tell(self, doing: str, *, percent: int | None = None, requests: int | None = None) -> None:
        """From now on. Never fails: a full disk is no reason to stop serving."""


class FileReporter(Reporter):
    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._told = Activity()
        self._told_at = 0.0

    def tell(self, doing: str, *, percent: int | None = None, requests: int | None = None) -> None:
        activity = Activity(doing, percent, requests)
        if activity == self._told or (doing == self._told.doing and self._is_soon()):
            return
        self._told, self._told_at = activity, self._clock()
        draft = self._file.with_name(self._file.name + ".new")
        with suppress(OSError):
            draft.write_bytes(msgspec.json.encode(activity))
            draft.replace(self._file)

    def _is_soon(self) -> bool:
        return self._clock() - self._told_at < _SHARE_SECONDS


def reporter_of(environ: Mapping[str, str]) -> Reporter:
    """To the file that the environment names; to none without it."""
    file = environ.get(ACTIVITY_VARIABLE)
    return FileReporter(Path(file)) if file else Reporter()


def read_activity(file: Path) -> Activity:
    """What was told last; nothing when there is no file, or none that a reporter wrote."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Activity)
    except (OSError, msgspec.MsgspecError):
        return Activity()
