"""The recording engine's state between calls: statistics, events, and the KV of prefills."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from trtllm_disagg.engines.recording.hard_edges import (
    GENERATION_TRANSFER_ERROR,
    EventLoopShutdownError,
    RequestError,
)
from trtllm_disagg.engines.recording.image_prompts import are_of

# -- events and statistics

_POLL_SECONDS = 0.1


class News:
    """One queue for all iterators (executor/executor.py keeps one IterationResult of each kind)."""

    def __init__(self, name: str, *, is_bound: bool) -> None:
        """`is_bound`: to the loop of its first caller."""
        self.name = name
        self._is_bound = is_bound
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: deque[dict[str, Any]] = deque()

    def take(self, made: list[dict[str, Any]], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """The records so far; the iterator waits only if there are none."""
        self._fetch(made)
        return self._items(0 if self._queue else timeout)

    def block_and_take(
        self, made: list[dict[str, Any]], timeout: float | None
    ) -> AsyncIterator[dict[str, Any]]:
        """Block the thread, polling the worker process every 0.1 s."""
        block(made, timeout)
        self._fetch(made)
        return self._items(timeout)

    def _fetch(self, made: list[dict[str, Any]]) -> None:
        records = drained(made)
        if self._is_bound:
            self._loop = self._loop or asyncio.get_running_loop()
            if records and self._loop.is_closed():
                self._queue.append(records[0])
                raise EventLoopShutdownError(f"the loop of the first reader of {self.name} is closed")
        self._queue.extend(records)

    async def _items(self, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        while True:
            while self._queue:
                yield self._queue.popleft()
            if timeout == 0:
                return
            if self._loop not in (None, asyncio.get_running_loop()):
                raise RuntimeError(f"the queue of {self.name} is bound to a different event loop")
            await asyncio.sleep(3600 if timeout is None else timeout)
            if not self._queue:
                return


def block(made: list[dict[str, Any]], timeout: float | None) -> None:
    """Block the thread until there is a record, or until the timeout."""
    until = time.monotonic() + (timeout or 0)
    while not made and (left := until - time.monotonic()) > 0:
        time.sleep(min(_POLL_SECONDS, left))


def drained(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take the records made so far."""
    records = made[:]
    del made[: len(records)]
    return records


# -- KV of finished prefills


@dataclass(frozen=True, slots=True)
class Meeting:
    """The two phases of one GENERATION_FIRST request. An abort sets both events, which ends all waits."""

    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    sent: asyncio.Event = field(default_factory=asyncio.Event)


class KvHolder:
    """Holds KV for decode. For worker processes, where decode needs only the handoff's fields."""

    def meeting(self, request_id: int | None) -> Meeting:
        raise NotImplementedError("the recording engine has no GENERATION_FIRST")

    def hold(self, prompt: list[int], owner: object, seconds: float | None) -> bytes:
        return b"nothing: the recording engine has no KV"

    def release(self, name: bytes) -> None:
        """Does nothing: there is no KV."""

    def take(self, name: bytes | None, prompt: list[int]) -> list[int] | None:
        """None: the KV counts as present."""
        return None

    def held_by(self, owner: object) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _Held:
    #: With contents of images.
    prompt: list[int]
    owner: object
    until: float


class KvStore(KvHolder):
    """Keeps prompts by opaque state, for a test's two workers in one process."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Held] = {}
        self._names = itertools.count(1)
        self._meetings: dict[int | None, Meeting] = {}

    def meeting(self, request_id: int | None) -> Meeting:
        """Both phases get the same one."""
        return self._meetings.setdefault(request_id, Meeting())

    def hold(self, prompt: list[int], owner: object = None, seconds: float | None = None) -> bytes:
        """`seconds`: how long; None: for ever."""
        name = f"kv-{next(self._names)}".encode()
        until = float("inf") if seconds is None else time.monotonic() + seconds
        self._held[name] = _Held(prompt, owner, until)
        return name

    def release(self, name: bytes) -> None:
        self._held.pop(name, None)

    def take(self, name: bytes | None, prompt: list[int]) -> list[int] | None:
        """Move the KV to decode: its contents. Raises RequestError if it is gone or of another prompt."""
        self._expire()
        held = None if name is None else self._held.pop(name, None)
        if held is None or not are_of(held.prompt, prompt):
            raise RequestError(GENERATION_TRANSFER_ERROR)
        return held.prompt

    def held_by(self, owner: object) -> int:
        self._expire()
        return sum(held.owner is owner for held in self._held.values())

    def __len__(self) -> int:
        self._expire()
        return len(self._held)

    def clear(self) -> None:
        self._held.clear()
        self._meetings.clear()

    def _expire(self) -> None:
        now = time.monotonic()
        for name in [name for name, held in self._held.items() if held.until <= now]:
            del self._held[name]
