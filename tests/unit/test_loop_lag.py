"""The check that no call stops an event loop: what it sees, and what it does not take for a call."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.support.loop_lag import loop_never_stands_still


async def test_a_call_that_blocks_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"the event loop waited \d+ ms in one call"):
        async with loop_never_stands_still():
            await asyncio.sleep(0)
            time.sleep(0.06)
            await asyncio.sleep(0)


async def test_a_call_that_blocks_up_to_the_end_is_seen() -> None:
    with pytest.raises(AssertionError, match="the event loop waited"):
        async with loop_never_stands_still():
            threading.Event().wait(0.06)


async def test_a_call_in_a_callback_is_seen() -> None:
    with pytest.raises(AssertionError, match="the event loop waited"):
        async with loop_never_stands_still():
            asyncio.get_running_loop().call_soon(time.sleep, 0.06)
            await asyncio.sleep(0)


async def test_what_computes_or_waits_as_it_should_is_not() -> None:
    async with loop_never_stands_still():
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0.1)
        await asyncio.to_thread(time.sleep, 0.1)


async def test_a_loop_in_another_thread_may_block() -> None:
    async def block() -> None:
        time.sleep(0.1)

    async with loop_never_stands_still():
        await asyncio.to_thread(asyncio.run, block())
