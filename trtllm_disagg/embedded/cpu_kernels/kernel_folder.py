"""Where compiled kernels are kept: a folder that only this user can write to, since what is in it is run.

Beside the source where that can be written to, else in the user's cache directory, else in a temporary folder, for
this process only. `NUMBA_CACHE_DIR` names another place.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

log = logging.getLogger(__name__)

_PRIVATE = 0o700
_HERE = Path(__file__).parent


def kernel_folder(name: str, environ: Mapping[str, str] = os.environ, beside: Path = _HERE) -> Path:
    """The folder `name`, made when it is missing, in the first place that will do; `beside` is the package."""
    tried = [place / name for place in _places(environ, beside)]
    for folder in tried:
        if _is_private(folder):
            return folder
    log.warning(
        "this process compiles its kernels for itself, which takes seconds: there is no folder to keep them in that "
        "belongs to this user and that others cannot write to (tried %s; NUMBA_CACHE_DIR can name one)",
        ", ".join(map(str, tried)),
    )
    folder = Path(tempfile.mkdtemp(prefix="trtllm-disagg-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _places(environ: Mapping[str, str], beside: Path) -> Iterator[Path]:
    if chosen := environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen).absolute() / "trtllm-disagg"
        return
    yield beside / "__pycache__" / "kernels"
    if caches := environ.get("XDG_CACHE_HOME"):
        yield Path(caches).absolute() / "trtllm-disagg" / "kernels"
    elif home := environ.get("HOME"):
        yield Path(home).absolute() / ".cache" / "trtllm-disagg" / "kernels"


def _is_private(folder: Path) -> bool:
    """Made if it is missing. Whether it is this user's, and only this user may write there."""
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK)
