"""An engine that has stopped working and says that it is well: requests run on it, and nothing comes of any of them.

How long a step may take is known to no one in general, so this looks at all requests together: one token of one of
them, or the end of one, is a sign of life.
"""

from __future__ import annotations

import asyncio
from typing import Any

from trtllm_disagg.engine.engine import Engine

#: Time in which this process was stopped, or its event loop held up, has few of them: so it does not count.
_LOOKS = 10


class Stall:
    """Looked at from time to time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_ended = engine.num_ended
        self._num_tokens: dict[Any, int] = {}
        #: In so many looks in a row nothing had come, although something ran.
        self.num_looks = 0

    def look(self) -> None:
        before, self._num_tokens = self._num_tokens, self._engine.tokens_so_far()
        # One that has come or left is none: clients do that, whatever the engine does.
        has_grown = any(count > before.get(waiting, 0) for waiting, count in self._num_tokens.items())
        has_ended = self._engine.num_ended != self._num_ended
        self._num_ended = self._engine.num_ended
        self.num_looks = 0 if has_grown or has_ended or not self._num_tokens else self.num_looks + 1


async def until_stalled(engine: Engine, seconds: float) -> str:
    """What there is to say of it."""
    stall = Stall(engine)
    while stall.num_looks <= _LOOKS:
        await asyncio.sleep(seconds / _LOOKS)
        stall.look()
    return f"none of its requests has had a token for {seconds:g} s (--engine-stall-timeout)"
