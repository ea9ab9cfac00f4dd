"""A base class for wrappers of chunk streams that work on the first chunk and at the end, and cost nothing between."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class PerRequestStream(AsyncGenerator[T, None]):
    """An async generator in two parts: `_first` makes the first element and sets `_rest`, the stream of all others.
    These do not pass through a frame of this class: an async generator that only passed its elements on would cost
    half a microsecond a token.

    Like every stream here it has to be closed by its reader, after an error and at its end too: `_finish` runs then.
    """

    _rest: AsyncGenerator[T, None] | None = None
    _next: Callable[[], Coroutine[Any, Any, T]] | None = None
    _has_begun = False
    _is_closed = False

    @abstractmethod
    async def _first(self) -> T:
        """Make the first element; set `_rest` before awaiting it. Raises StopAsyncIteration for an empty stream."""
        ...

    async def _finish(self) -> None:
        """Called once, after `_rest` was closed; also when the stream was never read."""

    def __anext__(self) -> Coroutine[Any, Any, T]:
        if self._next is not None:
            return self._next()
        if not self._has_begun or self._rest is None:
            return self._begin()
        element = self._rest.__anext__()
        # If `_rest` is such a stream and past its first element, skip it too.
        self._next = self._rest._next if isinstance(self._rest, PerRequestStream) else self._rest.__anext__
        return element

    async def _begin(self) -> T:
        if self._has_begun or self._is_closed:
            raise StopAsyncIteration
        self._has_begun = True
        return await self._first()

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._rest is not None:
                await self._rest.aclose()
        finally:
            await self._finish()

    async def asend(self, value: None, /) -> T:
        return await self.__anext__()

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: object = None,
        trace: TracebackType | None = None,
        /,
    ) -> T:
        """Not supported: no reader of these streams needs it."""
        raise NotImplementedError


class CountedStream(PerRequestStream[T]):
    """A stream that counts from its first read until it is closed, or until its first element."""

    def __init__(
        self,
        enter: Callable[[], Callable[[], None]],
        stream: Callable[[], AsyncGenerator[T, None]],
        *,
        until_first: bool = False,
    ) -> None:
        """`enter` counts, and returns what ends that; it may raise instead, and then there is no stream."""
        self._enter = enter
        self._stream = stream
        self._until_first = until_first
        self._leave: Callable[[], None] | None = None

    async def _first(self) -> T:
        self._leave = self._enter()
        self._rest = self._stream()
        first = await anext(self._rest)
        if self._until_first:
            self._end()
        return first

    async def _finish(self) -> None:
        self._end()

    def _end(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
