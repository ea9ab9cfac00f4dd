"""Checks the engine's health, detects a stall of an engine that reports it is healthy, and closes the engine.

TensorRT-LLM may block the thread that calls a dead rank. So the event loop never calls it, and if the event loop is
blocked all the same, the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.engine.daemon_thread import in_daemon_thread
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.types import GenerateRequest

log = logging.getLogger(__name__)


#: The minimum time between two checks, and the maximum between two looks at `Engine.fatal_error`.
_LEAST_BETWEEN, _MAX_BETWEEN_LOOKS = 0.05, 0.5
#: With the time to detect the death and end the process, a worker ends within 5 s of its engine's death.
_SHUTDOWN_DEAD = 4.0

#: Looks in one stall timeout. A stopped process or blocked event loop does not look, so it finds no stall.
_LOOKS = 10
#: For `stall_seconds`: seconds, tokens a second, and substitutes for arguments left to model and engine.
_FIRST_STEP_SECONDS, _LEAST_PREFILL_RATE = 120.0, 1000.0
_MODELS_LENGTH, _USUAL_TIMEOUT_MS = 131_072, 60_000


class Stall:
    """Detects that requests run without progress, which is a token or the end of any of them. How long a step may take
    depends on model, batch and GPU. Call `look` at regular intervals.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_ended = engine.num_ended
        self._num_tokens: dict[Any, int] = {}
        #: Number of consecutive looks with requests but no progress.
        self.num_looks = 0

    def look(self) -> None:
        before, self._num_tokens = self._num_tokens, self._engine.tokens_so_far()
        # Requests that appear or disappear are no progress: clients cause that.
        has_grown = any(count > before.get(waiting, 0) for waiting, count in self._num_tokens.items())
        has_ended = self._engine.num_ended != self._num_ended
        self._num_ended = self._engine.num_ended
        self.num_looks = 0 if has_grown or has_ended or not self._num_tokens else self.num_looks + 1


def stall_seconds(engine_args: Mapping[str, Any]) -> float:
    """The longest time without a token under TensorRT-LLM's arguments: the first step, which compiles kernels, a wait
    for KV, and the prefill of the longest prompt at no more than a fifth of any GPU's speed.
    """
    longest = max(engine_args.get(name) or 0 for name in ("max_seq_len", "max_num_tokens"))
    if not engine_args.get("max_seq_len"):
        longest = max(longest, _MODELS_LENGTH)
    transceiver = engine_args.get("cache_transceiver_config")
    wait = transceiver and (transceiver.get("kv_transfer_timeout_ms") or _USUAL_TIMEOUT_MS) / 1000
    return math.ceil(_FIRST_STEP_SECONDS + (wait or 0.0) + longest / _LEAST_PREFILL_RATE)


async def until_stalled(engine: Engine, seconds: float) -> str:
    """Return a description once the engine has made no progress for `seconds`."""
    stall = Stall(engine)
    while stall.num_looks <= _LOOKS:
        await asyncio.sleep(seconds / _LOOKS)
        stall.look()
    return f"none of its requests has had a token for {seconds:g} s (--engine-stall-timeout)"


async def probe(engine: Engine, request: GenerateRequest) -> None:
    """Run a request, or wait until another progresses, since it may queue behind prompts. Raises a DisaggError."""
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
    """The health checks' time limits, in seconds."""

    #: Between two checks; see also `between_looks`.
    between: float = 0.5
    #: The longest check of a live engine.
    check: float = 30.0
    #: For the event loop to handle the engine's death; after that it counts as blocked by the engine.
    handle: float = 10.0
    #: For the shutdown of a live engine, and of a dead one.
    shutdown: float = 60.0
    shutdown_dead: float = _SHUTDOWN_DEAD

    @classmethod
    def of(cls, between: float, check: float, shutdown: float) -> HealthTimes:
        """From the flags, where 0 means no pause between checks, and no limit, as in Dynamo's worker."""
        return cls(
            between=max(between, _LEAST_BETWEEN),
            check=check or math.inf,
            shutdown=shutdown or math.inf,
            shutdown_dead=min(shutdown or math.inf, _SHUTDOWN_DEAD),
        )

    @property
    def between_looks(self) -> float:
        """Between two looks at `Engine.fatal_error`, cheap to read even if checks are rare."""
        return min(self.between / 2, _MAX_BETWEEN_LOOKS)


TIMES = HealthTimes()


def end_process(reason: str) -> None:
    log.critical("%s: this process ends", reason)
    logging.shutdown()
    os._exit(1)


@dataclass(eq=False)
class EngineHealth:
    """One thread calls the engine's health check; another watches that the calls return."""

    engine: Engine
    #: Called once with the reason, in `start`'s event loop.
    on_death: Callable[[str], object]
    times: HealthTimes = TIMES
    end_process: Callable[[str], None] = end_process

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._handled = threading.Event()
        self._asked_at: float | None = None
        self._why_unhealthy: str | None = None

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: where to call `on_death`; by default the running one."""
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
        # Read here as well, since the recorded death may block the other thread.
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
            self.end_process("the engine is dead and blocks the worker")

    def declare_dead(self, reason: str) -> None:
        """Runs in the event loop."""
        self._handled.set()
        self.engine.die(reason)
        self.on_death(reason)


async def close(engine: Engine, times: HealthTimes = TIMES) -> bool:
    """Shut the engine down in a thread. Returns False if that takes too long; the thread goes on."""
    seconds = times.shutdown if engine.death is None else times.shutdown_dead
    log.info("shutting down the engine within %g s", seconds)
    try:
        async with asyncio.timeout(None if math.isinf(seconds) else seconds) as limit:
            await in_daemon_thread(engine.close, "engine-shutdown")
    except Exception:
        if limit.expired():
            log.error("the engine has not ended within %g s", seconds)
            return False
        log.exception("the engine's shutdown failed")
    return True
