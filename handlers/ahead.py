"""Reads an engine's output as fast as it comes, however slow the way to the client is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any


async def newest_states(result: Any, on_output: Callable[[], None]) -> AsyncGenerator[Any, None]:
    """`result` (a RequestOutput, cumulative) when it has grown: once for all that came while the caller was busy. What
    comes alone never waits. Raises what iterating the result raises, behind the last state.

    `on_output` is called for each output of the engine, also while the caller is busy.
    """
    news = asyncio.Event()

    async def read() -> None:
        try:
            async for _ in result:
                on_output()
                news.set()
        finally:
            news.set()

    reader = asyncio.create_task(read(), name="read-ahead")
    try:
        has_ended = False
        while not has_ended:
            await news.wait()
            news.clear()
            has_ended = reader.done()
            yield result
        await reader
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reader
