"""Work for a request that goes on after its answer has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_running: set[asyncio.Task[None]] = set()


def in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    # The event loop alone would let a task be collected while it waits.
    _running.add(task)
    task.add_done_callback(_running.discard)
