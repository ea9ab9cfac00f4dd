"""A value that may change while requests run."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Live(Generic[T]):
    """Whoever reads `value` for one request keeps what it read."""

    def __init__(self, value: T) -> None:
        self._value = value

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        self._value = value
