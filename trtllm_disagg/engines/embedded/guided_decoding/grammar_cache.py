"""Compiled grammars, kept for the next request with the same grammar as long as they do not take too much memory."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher

#: Some schemas take a hundred thousand times as much as others (`multipleOf` with a large number).
_MOST_BYTES = 512 << 20
_MOST_GRAMMARS = 256


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    """Allocated by this process and not freed. Unlike its resident memory it grows also where an allocation takes what
    an earlier one has freed. 0 with a C library other than glibc, where only the number of grammars is limited.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher
    num_bytes: int


class GrammarCache:
    def __init__(
        self,
        compile_grammar: Callable[[str], LLMatcher],
        most_bytes: int = _MOST_BYTES,
        heap_bytes: Callable[[], int] = heap_bytes,
    ) -> None:
        self._compile = compile_grammar
        self._most_bytes = most_bytes
        self._heap_bytes = heap_bytes
        #: The least recently used one first.
        self._kept: OrderedDict[str, _Compiled] = OrderedDict()

    def __contains__(self, grammar: str) -> bool:
        return grammar in self._kept

    def compiled(self, grammar: str) -> LLMatcher:
        """Raises what compiling raises."""
        if grammar not in self._kept:
            self._add(grammar)
        self._kept.move_to_end(grammar)
        return self._kept[grammar].matcher

    def _add(self, grammar: str) -> None:
        before = self._heap_bytes()
        matcher = self._compile(grammar)
        self._kept[grammar] = _Compiled(matcher, max(0, self._heap_bytes() - before))
        while len(self._kept) > 1 and self._is_too_large():
            self._kept.popitem(last=False)

    def _is_too_large(self) -> bool:
        num_bytes = sum(each.num_bytes for each in self._kept.values())
        return num_bytes > self._most_bytes or len(self._kept) > _MOST_GRAMMARS
