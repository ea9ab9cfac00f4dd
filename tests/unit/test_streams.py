"""Streams with work for their first element only."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from trtllm_disagg.streams import PerRequestStream


class Numbers:
    """1 to `count`, then `error` or the end."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.was_closed = False
        self._count, self._error = count, error

    async def read(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(1, self._count + 1):
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.was_closed = True


class Doubling(PerRequestStream[int]):
    """Doubles the first one."""

    def __init__(self, numbers: AsyncGenerator[int, None]) -> None:
        self._rest = numbers
        self.num_finished = 0

    async def _first(self) -> int:
        assert self._rest is not None
        return 2 * await anext(self._rest)

    async def _finish(self) -> None:
        self.num_finished += 1


async def test_wrapped_stream_computes_only_its_first_element() -> None:
    inner = Doubling(Numbers(4).read())
    outer = Doubling(inner)
    async with aclosing(outer):
        assert [number async for number in outer] == [4, 2, 3, 4]
        with pytest.raises(StopAsyncIteration):
            await anext(outer)
    await outer.aclose()
    assert (outer.num_finished, inner.num_finished) == (1, 1)


async def test_closing_early_closes_the_rest_before_it_finishes() -> None:
    numbers = Numbers(9)
    stream = Doubling(numbers.read())
    assert [await anext(stream), await anext(stream)] == [2, 2]
    await stream.aclose()
    assert numbers.was_closed
    assert stream.num_finished == 1


async def test_a_stream_that_is_never_read_finishes_when_it_is_closed() -> None:
    stream = Doubling(Numbers(1).read())
    await stream.aclose()
    assert stream.num_finished == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_an_error_reaches_the_reader_and_the_stream_finishes(count: int) -> None:
    inner = Doubling(Numbers(count, ValueError("late")).read())
    outer = Doubling(inner)
    async with aclosing(outer):
        with pytest.raises(ValueError, match="late"):
            await _read(outer)
    assert (outer.num_finished, inner.num_finished) == (1, 1)


async def _read(stream: AsyncGenerator[int, None]) -> list[int]:
    return [number async for number in stream]
