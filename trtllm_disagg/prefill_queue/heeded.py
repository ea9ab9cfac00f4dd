"""Waiting for a library that loses cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def heeded(answer: Awaitable[T]) -> T:
    """`answer`, but whoever is cancelled meanwhile hears of it.

    `asyncio.wait_for` of Python 3.11 forgets a cancel that comes in the same turn as its result, and NATS's client
    makes another error of some. Whoever then awaits the cancelled task would wait for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await answer
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
