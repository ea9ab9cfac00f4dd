"""Runs engine calls that may block for ever without keeping the process alive."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The result or error of `work`. A cancelled call leaves its thread until the process ends; closing the event loop
    would wait for a thread of asyncio's executor.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: object) -> None:
        if not outcome.done():
            set_it(value)

    def run() -> None:
        settling: Callable[[], None]
        try:
            settling = partial(settle, outcome.set_result, work())
        except BaseException as error:
            settling = partial(settle, outcome.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop ended without waiting
            loop.call_soon_threadsafe(settling)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
