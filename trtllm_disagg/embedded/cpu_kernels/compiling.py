"""That kernels are being compiled, told while it happens: it takes seconds, once on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trtllm_disagg.activity import Reporter

COMPILING = "compiling kernels (once)"


@contextmanager
def compiling_told(reporter: Reporter, *, compiles: bool) -> Iterator[None]:
    """Inside the block the reporter tells of every kernel that numba compiles, and does not only load. Where kernels
    are not compiled at all, numba is not imported for it.
    """
    if not compiles:
        yield
        return
    from numba.core import event

    class Told(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            reporter.tell(COMPILING)

        def on_end(self, event: Any) -> None:
            """The next step tells what comes next."""

    with event.install_listener("numba:compile", Told()):
        yield
