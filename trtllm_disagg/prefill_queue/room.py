"""How much a prefill worker takes on at once: what one step of its engine computes, and no more."""

from __future__ import annotations

import asyncio


class Room:
    """A worker pulls while fewer than `max_tokens` prompt tokens and `max_items` items are in it.

    So short prompts fill a step together, a long one is alone, and the engine always has its next step's work. What
    waits beyond that waits in the queue, where any worker may take it.
    """

    def __init__(self, max_items: int, max_tokens: int) -> None:
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._inside: dict[object, int] = {}
        self._changed = asyncio.Event()

    @property
    def is_there(self) -> bool:
        return len(self._inside) < self._max_items and sum(self._inside.values()) < self._max_tokens

    async def wait(self) -> None:
        while not self.is_there:
            self._changed.clear()
            await self._changed.wait()

    def enter(self, who: object, num_tokens: int) -> None:
        self._inside[who] = num_tokens

    def leave(self, who: object) -> None:
        self._inside.pop(who, None)
        self._changed.set()
