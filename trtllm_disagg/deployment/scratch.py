"""A temporary directory that goes when all went well, and stays with its logs when something failed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_disagg.deployment.errors import DeploymentFailedError


class Scratch:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_kept = False

    def keep(self) -> None:
        """There are logs in it that are worth reading."""
        self.is_kept = True


@contextmanager
def scratch_directory(prefix: str) -> Iterator[Scratch]:
    """For this user only. A deployment that failed keeps it: its report names logs in there."""
    scratch = Scratch(Path(tempfile.mkdtemp(prefix=prefix)))
    try:
        yield scratch
    except DeploymentFailedError:
        scratch.keep()
        raise
    finally:
        if not scratch.is_kept:
            shutil.rmtree(scratch.path, ignore_errors=True)
