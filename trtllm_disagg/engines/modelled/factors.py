"""The factors of all prefill and decode step times; a file may change them while the engine runs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)


class Factors(NamedTuple):
    prefill: float = 1.0
    decode: float = 1.0

    @classmethod
    def read(cls, file: Path) -> Factors:
        """Raises ConfigError for a file without valid factors."""
        try:
            said = json.loads(file.read_bytes())
            found = cls(float(said["prefill_factor"]), float(said["decode_factor"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _bad(file, error) from None
        if not (0 < found.prefill < float("inf") and 0 < found.decode < float("inf")):
            raise _bad(file, found)
        return found

    def write(self, file: Path) -> None:
        """Replace the file atomically."""
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(json.dumps({"prefill_factor": self.prefill, "decode_factor": self.decode}))
        os.replace(partial, file)


def _bad(file: Path, said: object) -> ConfigError:
    allowed = 'a file with {"prefill_factor": 1.0, "decode_factor": 1.0}, both above 0'
    return ConfigError.bad_value("modelled.factors_file", f"{file}: {said}", allowed)


#: Called when work begins after a rest, never in the middle of a request.
FactorsNow = Callable[[], Factors]


class FactorsFile:
    """Factors from a file. Raises ConfigError for an invalid file at first; a later invalid one changes nothing."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._factors = Factors.read(file)
        self._seen = _version(file)

    def now(self) -> Factors:
        if (version := _version(self._file)) != self._seen:
            self._seen = version
            try:
                self._factors = Factors.read(self._file)
            except ConfigError as error:
                log.error("the factors stay as they are: %s", error)
        return self._factors


def _version(file: Path) -> tuple[int, int] | None:
    """Changes whenever the file is replaced, without reading it; None without the file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
