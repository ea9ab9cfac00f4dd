"""Checks the engine's health, detects an engine that is stalled although it says that it is healthy, and closes it.

TensorRT-LLM may block the thread that calls a dead rank. So the event loop that serves requests does not call it, and
when the event loop is blocked all the same, the process ends.
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

from trtllm_disagg.engine.daemon_thread import in_daemon_thread
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.types import GenerateRequest

log = logging.getLogger(__name__)


#: The shortest time between two checks, and the longest between two looks at `Engine.fatal_error`.
_LEAST_BETWEEN, _MOST_BETWEEN_LOOKS = 0.05, 0.5
#: With what finding the death takes, and the rest of the process, this ends a worker within 5 s of its engine's death.
_SHUTDOWN_DEAD = 4.0

#: Looks in one stall timeout. A process that is stopped, or has a blocked event loop, does not look, and so no stall is
#: found then.
_LOOKS = 10


class Stall:
    """Detects that requests run and none of them makes progress; `look` is called at regular intervals. A token of one
    of them, or the end of one, is progress: how long a step may take depends on model, batch and GPU.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_ended = engine.num_ended
        self._num_tokens: dict[Any, int] = {}
        #: Number of consecutive looks without progress, although requests ran.
        self.num_looks = 0

    def look(self) -> None:
        before, self._num_tokens = self._num_tokens, self._engine.tokens_so_far()
        # Requests that appear or disappear are no progress: clients cause that, whatever the engine does.
        has_grown = any(count > before.get(waiting, 0) for waiting, count in self._num_tokens.items())
        has_ended = self._engine.num_ended != self._num_ended
        self._num_ended = self._engine.num_ended
        self.num_looks = 0 if has_grown or has_ended or not self._num_tokens else self.num_looks + 1


async def until_stalled(engine: Engine, seconds: float) -> str:
    """Return, with a description, when the engine has made no progress for `seconds`."""
    stall = Stall(engine)
    while stall.num_looks <= _LOOKS:
        await asyncio.sleep(seconds / _LOOKS)
        stall.look()
    return f"none of its requests has had a token for {seconds:g} s (--engine-stall-timeout)"


async def probe(engine: Engine, request: GenerateRequest) -> None:
    """Run a request, or until another gets a token or its end: it may wait behind prompts. Raises a DisaggError."""
    stall, running = Stall(engine), asyncio.ensure_future(engine.probe(request))
    stall.look()
    try:
        while not (await asyncio.wait({running}, timeout=_LEAST_BETWEEN))[0]:
            stall.look()
            if stall.num_looks == 0:
                return
        await running
    finally:
        running.cancel()


@dataclass(frozen=True, slots=True)
class HealthTimes:
    """Time limits of the health checks, in seconds."""

    #: Between two checks; see `between_looks`, too.
    between: float = 0.5
    #: A check that takes longer than this means that the engine is dead.
    check: float = 30.0
    #: For the event loop to handle the engine's death; one that takes longer is blocked by the dead engine.
    handle: float = 10.0
    #: For the shutdown of an engine that is alive, and of a dead one.
    shutdown: float = 60.0
    shutdown_dead: float = _SHUTDOWN_DEAD

    @classmethod
    def of(cls, between: float, check: float, shutdown: float) -> HealthTimes:
        """From the flags, where 0 means no time between two checks, and no limit, as in Dynamo's worker."""
        return cls(
            between=max(between, _LEAST_BETWEEN),
            check=check or math.inf,
            shutdown=shutdown or math.inf,
            shutdown_dead=min(shutdown or math.inf, _SHUTDOWN_DEAD),
        )

    @property
    def between_looks(self) -> float:
        """Between two looks at `Engine.fatal_error`, which is cheap to read, however rare the checks are."""
        return min(self.between / 2, _MOST_BETWEEN_LOOKS)


TIMES = HealthTimes()


def end_process(reason: str) -> None:
    log.critical("%s: this process ends", reason)
    logging.shutdown()
    os._exit(1)


@dataclass(eq=False)
class EngineHealth:
    """Two threads: one calls the engine's health check, the other watches that these calls return."""

    engine: Engine
    #: Called once with the reason, in the event loop of `start`.
    on_death: Callable[[str], object]
    times: HealthTimes = TIMES
    end_process: Callable[[str], None] = end_process

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._handled = threading.Event()
        self._asked_at: float | None = None
        self._why_unhealthy: str | None = None

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: where `on_death` is called; by default the running one."""
        self._loop = loop or asyncio.get_running_loop()
        for work, name in ((self._ask, "engine-health"), (self._watch, "engine-watch")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _ask(self) -> None:
        while not self._stopping.is_set() and self._why_unhealthy is None:
            self._asked_at = time.monotonic()
            self._why_unhealthy = self.engine.why_unhealthy()
            self._asked_at = None
            self._stopping.wait(self.times.between)

    def _watch(self) -> None:
        while not self._stopping.wait(self.times.between_looks):
            reason = self._reason()
            if reason is not None:
                self._report(reason)
                return

    def _reason(self) -> str | None:
        # Read here as well, because the other thread may be blocked by the death that is recorded here.
        if (error := self.engine.fatal_error) is not None:
            return f"{type(error).__name__}: {error}"
        asked_at = self._asked_at
        if asked_at is not None and time.monotonic() - asked_at > self.times.check:
            return f"it has not answered for {self.times.check:g} s"
        return self._why_unhealthy

    def _report(self, reason: str) -> None:
        log.error("the engine is dead: %s", reason)
        try:
            self._loop.call_soon_threadsafe(self.declare_dead, reason)
        except RuntimeError:
            return  # the worker has ended
        if not self._handled.wait(self.times.handle) and not self._stopping.is_set():
            self.end_process("the engine is dead, and blocks the worker")

    def declare_dead(self, reason: str) -> None:
        """Runs in the event loop."""
        self._handled.set()
        self.engine.die(reason)
        self.on_death(reason)


async def close(engine: Engine, times: HealthTimes = TIMES) -> bool:
    """Shut the engine down in a thread. Returns False when that takes too long; the thread goes on then."""
    seconds = times.shutdown if engine.death is None else times.shutdown_dead
    log.info("the engine shuts down; it has %g s", seconds)
    try:
        async with asyncio.timeout(None if math.isinf(seconds) else seconds) as limit:
            await in_daemon_thread(engine.close, "engine-shutdown")
    except Exception:
        if limit.expired():
            log.error("the engine has not ended within %g s", seconds)
            return False
        log.exception("the engine's shutdown failed")
    return True
