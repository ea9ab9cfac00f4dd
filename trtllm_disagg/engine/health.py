"""Whether the engine lives, asked outside the event loop; whether it works, although it says that it is well; and its
end, waited for not for ever.

TensorRT-LLM may block whichever thread asks a dead rank for something: the loop that serves requests does not ask, and
when it is held up all the same, the process ends without it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.engine.engine import Engine

log = logging.getLogger(__name__)


_LEAST_BETWEEN, _MOST_BETWEEN_LOOKS = 0.05, 0.5
_SHUTDOWN_DEAD = 5.0

#: Time in which this process was stopped, or its event loop held up, has few of them: so it does not count.
_LOOKS = 10


class Stall:
    """Requests run, and nothing comes of any of them. Looked at from time to time.

    How long a step may take depends on model, batch and GPU, so this looks at all requests at once: a token of one of
    them, or the end of one, is a sign of life.
    """

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


@dataclass(frozen=True, slots=True)
class HealthTimes:
    """Seconds."""

    #: Between two checks, and two looks at what the engine has noted of itself.
    between: float = 0.5
    #: A check that takes longer than this is the answer: no.
    check: float = 30.0
    #: For the event loop to hear of it; one that does not is held up by the dead engine.
    hear: float = 10.0
    #: For the end of an engine that lives, and of one that does not.
    shutdown: float = 60.0
    shutdown_dead: float = _SHUTDOWN_DEAD

    @classmethod
    def of(cls, between: float, check: float, shutdown: float) -> HealthTimes:
        """Here 0 is no time between two checks, and no limit, as Dynamo's worker has it."""
        return cls(
            between=max(between, _LEAST_BETWEEN),
            check=check or math.inf,
            shutdown=shutdown or math.inf,
            shutdown_dead=min(shutdown or math.inf, _SHUTDOWN_DEAD),
        )

    @property
    def between_looks(self) -> float:
        """However rarely the engine is asked, what it has noted of its own death costs nothing to read."""
        return min(self.between / 2, _MOST_BETWEEN_LOOKS)


TIMES = HealthTimes()


def end_process(reason: str) -> None:
    log.critical("%s: this process ends", reason)
    logging.shutdown()
    os._exit(1)


class EngineHealth:
    """Two threads: one asks the engine, the other looks whether that one comes back."""

    def __init__(
        self,
        engine: Engine,
        on_death: Callable[[str], None],
        times: HealthTimes = TIMES,
        end_process: Callable[[str], None] = end_process,
    ) -> None:
        """`on_death` hears the reason, once, in the event loop of `start`."""
        self._engine = engine
        self._on_death = on_death
        self._times = times
        self._end_process = end_process
        self._stopping = threading.Event()
        self._heard = threading.Event()
        self._asked_at: float | None = None
        self._ailment: str | None = None

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: that hears of a death; by default the one that runs here."""
        self._loop = loop or asyncio.get_running_loop()
        for work, name in ((self._ask, "engine-health"), (self._watch, "engine-watch")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _ask(self) -> None:
        while not self._stopping.is_set() and self._ailment is None:
            self._asked_at = time.monotonic()
            self._ailment = self._engine.ailment()
            self._asked_at = None
            self._stopping.wait(self._times.between)

    def _watch(self) -> None:
        while not self._stopping.wait(self._times.between_looks):
            reason = self._reason()
            if reason is not None:
                self._tell(reason)
                return

    def _reason(self) -> str | None:
        # Not what the other thread waits for: that one may be held up by the death that is noted here.
        if (error := self._engine.fatal_error) is not None:
            return f"{type(error).__name__}: {error}"
        asked_at = self._asked_at
        if asked_at is not None and time.monotonic() - asked_at > self._times.check:
            return f"it has not answered for {self._times.check:g} s"
        return self._ailment

    def _tell(self, reason: str) -> None:
        log.error("the engine is dead: %s", reason)
        try:
            self._loop.call_soon_threadsafe(self.hear, reason)
        except RuntimeError:
            return  # the worker has ended
        if not self._heard.wait(self._times.hear) and not self._stopping.is_set():
            self._end_process("the engine is dead, and holds up the worker")

    def hear(self, reason: str) -> None:
        """In the event loop: the engine counts as dead."""
        self._heard.set()
        self._engine.die(reason)
        self._on_death(reason)


async def close(engine: Engine, times: HealthTimes = TIMES) -> bool:
    """Whether the engine has ended in time. It does so in a thread, which goes on when it has not."""
    seconds = times.shutdown if engine.death is None else times.shutdown_dead
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()

    def end(is_well: bool) -> None:
        if not ended.done():
            ended.set_result(is_well)

    def work() -> None:
        try:
            engine.close()
        except Exception:
            log.exception("the engine's shutdown failed")
        try:
            loop.call_soon_threadsafe(end, True)
        except RuntimeError:
            return  # it took longer than the worker waited

    log.info("the engine shuts down; it has %g s", seconds)
    threading.Thread(target=work, name="engine-shutdown", daemon=True).start()
    try:
        return await asyncio.wait_for(ended, None if math.isinf(seconds) else seconds)
    except TimeoutError:
        log.error("the engine has not ended within %g s", seconds)
        return False
