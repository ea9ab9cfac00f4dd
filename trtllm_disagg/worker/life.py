"""A worker's life on one page: its states, what happens to it, and the one sequence that it lives by (`live`).

The engine lives as long as the process; what is around it lives for one role term.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self, TypeVar

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import WorkerLeavingError

log = logging.getLogger(__name__)


class State(Enum):
    """Where a worker is in its role term. Its description has the value."""

    #: The engine loads, or is there from the role term before; discovery does not list this worker yet.
    LOADING = "loading"
    #: Other workers see it. It is compared with them, and registers.
    LISTED = "listed"
    SERVING = "serving"
    #: It leaves discovery, and still answers callers that do not know.
    UNLISTED = "unlisted"
    #: It finishes its requests.
    DRAINING = "draining"
    OVER = "over"


class Event(Enum):
    """What happens to a worker."""

    LOADED = "loaded"
    PAIRED = "paired"
    STOP = "told to stop"
    FLIP = "flip"
    FINISH = "finish with its revision"
    DROPPED = "dropped by discovery"
    DIED = "engine died"
    FAILED = "role term failed"
    AWAKE = "frozen and awake, or its files are lost"
    UNCALLED = "callers know that it left"
    DRAINED = "drained"
    DEADLINE = "deadline"
    NEXT = "next role term"


class Action(Enum):
    """What a worker does about it."""

    LIST = "enter discovery"
    SERVE = "be ready"
    #: Leave, for this reason.
    LEAVE = "leave"
    #: Go on leaving, but for this reason.
    PREVAIL = "prevail"
    REFUSE = "refuse"
    RENEW = "enter again"
    DRAIN = "wait for requests"
    HAND_BACK = "hand requests back"
    END = "end the runtime"
    OPEN = "open a runtime"
    IGNORE = "ignore"


_ROWS: Mapping[State, Mapping[Event, tuple[State, Action]]] = {
    State.LOADING: {
        Event.LOADED: (State.LISTED, Action.LIST),
        Event.STOP: (State.OVER, Action.END),
        Event.DIED: (State.OVER, Action.END),
        Event.FAILED: (State.OVER, Action.END),
    },
    State.LISTED: {
        Event.PAIRED: (State.SERVING, Action.SERVE),
        Event.STOP: (State.UNLISTED, Action.LEAVE),
        Event.FLIP: (State.UNLISTED, Action.LEAVE),
        Event.FINISH: (State.UNLISTED, Action.LEAVE),
        Event.DROPPED: (State.OVER, Action.END),
        Event.DIED: (State.UNLISTED, Action.LEAVE),
        Event.FAILED: (State.OVER, Action.END),
        Event.AWAKE: (State.LISTED, Action.RENEW),
    },
    State.SERVING: {
        Event.STOP: (State.UNLISTED, Action.LEAVE),
        Event.FLIP: (State.UNLISTED, Action.LEAVE),
        Event.FINISH: (State.UNLISTED, Action.LEAVE),
        Event.DROPPED: (State.OVER, Action.END),
        Event.DIED: (State.UNLISTED, Action.LEAVE),
        Event.FAILED: (State.OVER, Action.END),
        Event.AWAKE: (State.SERVING, Action.RENEW),
    },
    State.UNLISTED: {
        Event.STOP: (State.UNLISTED, Action.PREVAIL),
        Event.FINISH: (State.UNLISTED, Action.PREVAIL),
        Event.DIED: (State.UNLISTED, Action.PREVAIL),
        Event.FAILED: (State.OVER, Action.END),
        Event.UNCALLED: (State.DRAINING, Action.DRAIN),
    },
    State.DRAINING: {
        Event.STOP: (State.DRAINING, Action.PREVAIL),
        Event.FINISH: (State.DRAINING, Action.PREVAIL),
        Event.DIED: (State.DRAINING, Action.PREVAIL),
        Event.FAILED: (State.OVER, Action.END),
        Event.DRAINED: (State.OVER, Action.END),
        Event.DEADLINE: (State.OVER, Action.HAND_BACK),
    },
    State.OVER: {
        Event.STOP: (State.OVER, Action.PREVAIL),
        Event.DIED: (State.OVER, Action.PREVAIL),
        Event.NEXT: (State.LOADING, Action.OPEN),
    },
}
#: Of what a state has no row for, commands are refused, and nothing else changes anything.
_COMMANDS = (Event.FLIP, Event.FINISH)
TABLE = {
    (state, event): _ROWS[state].get(event, (state, Action.REFUSE if event in _COMMANDS else Action.IGNORE))
    for state in State
    for event in Event
}


@dataclass(frozen=True, slots=True)
class Reason:
    """How a role term ends for one event."""

    #: For the log, and for the errors of requests.
    text: str
    #: It leaves discovery in order, and answers callers that do not know yet.
    has_grace: bool = False
    #: It stays for the whole grace period, also when no request comes any more.
    stays: bool = False
    #: All workers of its namespace leave, so that gets no new request, although others are still there.
    closes_namespace: bool = False
    #: A role term follows.
    has_next: bool = False


REASONS = {
    Event.STOP: Reason("SIGTERM or SIGINT", has_grace=True, stays=True),
    Event.FLIP: Reason("it becomes a {becomes} worker", has_grace=True, has_next=True),
    Event.FINISH: Reason("a command", has_grace=True, stays=True, closes_namespace=True),
    Event.DROPPED: Reason("discovery has dropped it", has_next=True),
    Event.DIED: Reason("its engine died"),
    Event.FAILED: Reason("it cannot serve in this role", has_next=True),
}


class Life:
    """The state of one worker, from its start to its end. Only `happened` changes it."""

    def __init__(self) -> None:
        self.state = State.LOADING
        #: This worker has been serving in this role term.
        self.has_served = False
        #: Why the role term ends, or has ended.
        self._why: Event | None = None
        self._to: Role | None = None
        self._ends = asyncio.Event()

    def happened(self, event: Event) -> Action:
        self.state, action = TABLE[self.state, event]
        if action is Action.OPEN:
            self._why, self.has_served = None, False
            self._ends.clear()
        self.has_served |= action is Action.SERVE
        # The first reason stays; only an end for good prevails over a next role term, and the engine's death over all.
        prevails = action is Action.PREVAIL and (self.reason.has_next or event is Event.DIED)
        if prevails or (self._why is None and action in (Action.LEAVE, Action.END)):
            self._why = event
            self._ends.set()
        return action

    def tell(self, event: Event) -> None:
        """What happened, and nothing waits for the action."""
        self.happened(event)

    def command(self, event: Event, to: Role | None = None) -> Action:
        """`to`: the role of a flip. Raises WorkerLeavingError in a state that takes no command."""
        if (action := self.happened(event)) is Action.REFUSE:
            raise WorkerLeavingError(f"this worker takes no {event.value} now: it is {self.state.value}")
        self._to = to
        return action

    @property
    def reason(self) -> Reason:
        """Only while a role term ends."""
        return REASONS[self._why or Event.FAILED]

    @property
    def why(self) -> str:
        return self.reason.text.format(becomes=self._to)

    @property
    def becomes(self) -> Role | None:
        """The role that this worker flips to."""
        return self._to if self._why is Event.FLIP else None

    async def ended(self, serving: asyncio.Task[None]) -> None:
        """Wait until the role term ends, or `serving` by itself: with an error, or since discovery dropped it."""
        told = asyncio.create_task(self._ends.wait())
        try:
            await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
        if serving.done():
            self.happened(Event.FAILED if serving.exception() else Event.DROPPED)


class Term(Protocol):
    """The part of `worker.RoleTerm` that is used here."""

    @property
    def role(self) -> Role: ...

    def entered(self) -> AbstractAsyncContextManager[asyncio.Task[None]]:
        """The task loads what is missing, enters discovery, registers and serves. The runtime ends with the block."""

    async def leave(self) -> None:
        """The one sequence of leaving (`leaving.Leaving`); nothing where the life is over."""

    def following(self, to: Role | None) -> Self:
        """The next role term, in the role `to`; None: in this one's."""

    def again(self, after: Self) -> Self:
        """A role term as this one was, after one that failed."""


T = TypeVar("T", bound=Term)


class Worker(Protocol):
    life: Life

    def require_engine(self, error: Exception | None = None) -> None:
        """Raises EngineLostError when the engine has died; `error`: what failed because of that."""


async def live(worker: Worker, first: T) -> None:
    """The only sequence: role terms, one after another. Raises what a role term in use raises, or the first one; one
    that cannot be entered gives way to the one before.
    """
    life = worker.life
    term: T | None = first
    before: T | None = None
    while term is not None:
        life.tell(Event.NEXT)
        try:
            async with term.entered() as serving:
                await life.ended(serving)
                await term.leave()
        except Exception as error:
            life.happened(Event.FAILED)
            worker.require_engine(error)
            if before is None or life.has_served:
                raise
            log.error("this worker cannot be a %s worker: %s", term.role, error)
            following, before = before.again(after=term), None
        else:
            worker.require_engine()
            following, before = term.following(life.becomes), term
        term = following if life.reason.has_next else None
