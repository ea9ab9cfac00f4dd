"""Argparse types for numbers. Each raises ArgumentTypeError for another text."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from math import inf


def positive_up_to(maximum: float) -> Callable[[str], int]:
    """Reads an integer from 1 to `maximum`."""
    allowed = "a number from 1" + (f" to {maximum}" if maximum < inf else "")

    def parse(text: str) -> int:
        # Python refuses numbers of thousands of digits.
        is_read = text.isdecimal() and len(text) <= 20
        if not is_read or not 1 <= int(text) <= maximum:
            raise ArgumentTypeError(f"{text!r} is not allowed; expected {allowed}")
        return int(text)

    return parse


positive = positive_up_to(inf)


def more_than_zero(text: str) -> float:
    """Reads a number above 0."""
    if number := not_negative(text):
        return number
    raise ArgumentTypeError(f"{text!r} is not allowed; expected a number above 0")


def not_negative(text: str) -> float:
    """Reads a number from 0."""
    with suppress(ValueError):
        if 0 <= (number := float(text)) < inf:
            return number
    raise ArgumentTypeError(f"{text!r} is not allowed; expected a number from 0")
