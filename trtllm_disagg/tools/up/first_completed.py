"""Waits for the first of two coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

First = TypeVar("First")
Second = TypeVar("Second")


async def first_completed(
    first: Coroutine[Any, Any, First], second: Coroutine[Any, Any, Second], timeout: float | None = None
) -> First | Second | None:
    """The result of the one that ends first, the second one when both did; None after `timeout` seconds.

    The other one is cancelled, and over, before this returns.
    """
    a, b = asyncio.create_task(first), asyncio.create_task(second)
    try:
        await asyncio.wait((a, b), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        a.cancel()
        b.cancel()
        await asyncio.gather(a, b, return_exceptions=True)
    if not b.cancelled():
        return b.result()
    return None if a.cancelled() else a.result()
