"""Keeps logs of other processes short: a full log is copied to its predecessor `NAME.1` and emptied.

The writing process keeps the file open, so the file itself must stay; it must have been opened for appending. A line
that is written between copying and emptying is lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

#: The size of a full log. Frontend and workers write one or two kilobytes for each request.
MOST_BYTES = 64 << 20
_OLD_SUFFIX = ".1"


def move_to_predecessor(log: Path, most_bytes: int = MOST_BYTES) -> bool:
    """Empties a full log; returns whether it was full. Raises OSError if the copy fails; `log` stays as it is then."""
    if log.stat().st_size < most_bytes:
        return False
    with log.open("r+b") as full, _predecessor(log).open("wb") as old:
        shutil.copyfileobj(full, old, 1 << 20)
        full.truncate(0)
    return True


def forget_predecessor(log: Path) -> None:
    _predecessor(log).unlink(missing_ok=True)


def halves(log: Path) -> list[Path]:
    """The existing ones of predecessor and log, the older one first."""
    return [half for half in (_predecessor(log), log) if half.is_file()]


def _predecessor(log: Path) -> Path:
    return log.with_name(log.name + _OLD_SUFFIX)
