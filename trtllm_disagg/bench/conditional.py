"""Conditional disaggregation between two engines: which one computes the next prompt?

A prompt is computed where it is decoded when that is sooner. No time is guessed: prompts wait in one line, and each
goes to the engine that has room for it first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum


class Place(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Occupancy:
    """What both engines have to do, as far as it matters to the next prompt, and the prompts that wait for it."""

    def __init__(self, budgets: dict[Place, int], max_batch_size: int) -> None:
        """`budgets`: prompt tokens that each engine computes in one step; the batch is the decode engine's."""
        self._budgets, self._max_batch_size = budgets, max_batch_size
        #: Prompt tokens that each engine was given and has not answered yet.
        self.unfinished = dict.fromkeys(Place, 0)
        #: Answers that the decode engine has in hand, among them its own prompts and KV that it has yet to pull.
        self.rows = 0
        self._waiting: deque[tuple[int, asyncio.Future[Place]]] = deque()

    async def place(self, num_tokens: int) -> Place:
        """Returns when an engine has room, first come first served; the prompt has started there then."""
        turn: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_tokens, turn))
        self._advance()
        return await turn

    def place_for(self, num_tokens: int) -> Place | None:
        """None while both are busy. The prefill engine first: there no running answer waits for the prompt.

        A prompt that the decode engine had no row for would stop its line, and with it the KV that comes from prefill.
        """
        if self._has_room(Place.PREFILL, num_tokens):
            return Place.PREFILL
        if self.rows < self._max_batch_size and self._has_room(Place.DECODE, num_tokens):
            return Place.DECODE
        return None

    def start(self, place: Place, num_tokens: int) -> None:
        self.unfinished[place] += num_tokens
        self.rows += place is Place.DECODE

    def first_token(self, place: Place, num_tokens: int) -> None:
        """The prompt is done; one from the prefill engine goes to the decode engine now."""
        self.unfinished[place] -= num_tokens
        self.rows += place is Place.PREFILL
        self._advance()

    def last_token(self) -> None:
        self.rows -= 1
        self._advance()

    def _has_room(self, place: Place, num_tokens: int) -> bool:
        """It has no prompt, or only such that they all fit into a step."""
        unfinished = self.unfinished[place]
        return not unfinished or unfinished + num_tokens <= self._budgets[place]

    def _advance(self) -> None:
        while self._waiting:
            num_tokens, turn = self._waiting[0]
            place = self.place_for(num_tokens)
            if place is None:
                return
            self._waiting.popleft()
            self.start(place, num_tokens)
            turn.set_result(place)
