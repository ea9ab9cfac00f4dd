"""A command's output without the log of the runtime under it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, redirect_stderr

_STDERR = 2


@contextmanager
def quiet_runtime(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, what Python prints to stderr arrives there, and what Dynamo's runtime logs does not.

    The runtime writes a line for each of its own requests at every level, `off` included, past Python to descriptor 2;
    what it writes later, when the process ends, DYN_LOG keeps back, so its module must be imported inside. Where the
    user has set DYN_LOG, the runtime's log stays.
    """
    if environ.get("DYN_LOG"):
        yield
        return
    environ["DYN_LOG"] = "off"
    sys.stderr.flush()
    with os.fdopen(os.dup(_STDERR), "w", buffering=1) as ours, redirect_stderr(ours):
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(ours.fileno(), _STDERR)
