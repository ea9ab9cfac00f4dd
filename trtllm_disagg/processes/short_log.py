"""Logs of other processes, kept short: a full one becomes its predecessor, and goes on empty.

The process that writes it holds the file open and knows nothing of this, so the file itself stays and is emptied; it
must have been opened for appending. A line that is written in the moment between the two is lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

#: Frontend and workers write one or two kilobytes a request.
MOST_BYTES = 64 << 20
_OLD_SUFFIX = ".1"


def move_to_predecessor(log: Path, most_bytes: int = MOST_BYTES) -> bool:
    """Whether it was full. Raises OSError, and changes nothing in `log`, where the disk does not take it."""
    if log.stat().st_size < most_bytes:
        return False
    with log.open("r+b") as full, _predecessor(log).open("wb") as old:
        shutil.copyfileobj(full, old, 1 << 20)
        full.truncate(0)
    return True


def forget_predecessor(log: Path) -> None:
    _predecessor(log).unlink(missing_ok=True)


def halves(log: Path) -> list[Path]:
    """Those that are there, the older one first."""
    return [half for half in (_predecessor(log), log) if half.is_file()]


def _predecessor(log: Path) -> Path:
    return log.with_name(log.name + _OLD_SUFFIX)
