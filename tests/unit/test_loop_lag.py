"""The check that no call stops an event loop: what it sees, and what it does not take for a call."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.support.loop_lag import LIMIT, loop_never_stands_still, may_wait


def block(seconds: float = 2 * LIMIT) -> None:
    """As a call does that waits for an engine."""
    threading.Event().wait(seconds)


async def in_the_middle() -> None:
    await asyncio.sleep(0)
    block()
    await asyncio.sleep(0)


async def at_the_end() -> None:
    block()


async def in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(block)
    await asyncio.sleep(0)


async def after_a_call_that_may_wait() -> None:
    with may_wait():
        block()
    block()


async def checked(what: Callable[[], Awaitable[None]]) -> None:
    async with loop_never_stands_still():
        await what()


@pytest.mark.parametrize("what", [in_the_middle, at_the_end, in_a_callback, after_a_call_that_may_wait])
async def test_blocking_call_on_the_event_loop_is_detected(what: Callable[[], Awaitable[None]]) -> None:
    # A page that is read from a disk meanwhile hides a call, and says nothing about the next one.
    assert any([await was_detected(what) for _ in range(3)])


async def was_detected(what: Callable[[], Awaitable[None]]) -> bool:
    try:
        await checked(what)
    except AssertionError as error:
        return re.search(r"the event loop waited \d+ ms in one call", str(error)) is not None
    return False


async def test_computation_and_proper_waits_are_not_reported_as_blocking() -> None:
    async with loop_never_stands_still():
        compute(LIMIT)
        await asyncio.sleep(2 * LIMIT)
        await asyncio.to_thread(block)


def compute(seconds: float) -> None:
    """With the interpreter lock, as far as others leave it."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_loop_that_waits_for_the_interpreter_lock_only_is_not_stopped() -> None:
    others = [threading.Thread(target=compute, args=(2 * LIMIT,)) for _ in range(3)]
    for other in others:
        other.start()
    async with loop_never_stands_still():
        began, ran = time.monotonic(), time.thread_time()
        compute(LIMIT)
        waited = time.monotonic() - began - (time.thread_time() - ran)
    for other in others:
        other.join()
    assert waited > LIMIT, "the lock was with the other threads for longer than a call may take"


async def test_a_call_that_blocks_is_seen_although_other_threads_have_the_interpreter_lock() -> None:
    other = threading.Thread(target=compute, args=(3 * LIMIT,))
    other.start()
    with pytest.raises(AssertionError, match="the event loop waited"):
        await checked(in_the_middle)
    other.join()


async def test_a_loop_in_another_thread_may_block() -> None:
    async with loop_never_stands_still():
        await asyncio.to_thread(asyncio.run, at_the_end())


async def test_a_call_that_may_wait_is_not_reported() -> None:
    async with loop_never_stands_still():
        with may_wait():
            block()
