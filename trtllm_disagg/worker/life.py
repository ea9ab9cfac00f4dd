"""A worker's life on one page: its states and events (`TABLE`), and the sequence of its role terms (`live`).

The engine lives for the process, all around it for one role term.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self, TypeVar

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import WorkerLeavingError

log = logging.getLogger(__name__)


class State(Enum):
    """A worker's state in its role term, shown in its description."""

    #: The engine loads, or is loaded from the previous role term; discovery does not list this worker.
    LOADING = "loading"
    #: Other workers see it. It compares itself with them, and registers.
    LISTED = "listed"
    SERVING = "serving"
    #: It leaves discovery, but answers callers that do not know.
    UNLISTED = "unlisted"
    #: It finishes its requests.
    DRAINING = "draining"
    OVER = "over"


class Event(Enum):
    """What happens to a worker."""

    LOADED = "loaded"
    PAIRED = "paired"
    STOP = "stop signal"
    FLIP = "flip"
    FINISH = "drain with its revision"
    #: Its lease is over. A leaving worker continues to leave: it flips or ends, as commanded.
    DROPPED = "dropped by discovery"
    DIED = "engine died"
    FAILED = "role term failed"
    #: It finishes its requests, and waits.
    PAUSE = "pause"
    RESUME = "resume"
    #: Its files in discovery may be gone.
    AWAKE = "frozen and awake"
    UNCALLED = "callers know that it left"
    DRAINED = "drained"
    DEADLINE = "deadline"
    NEXT = "next role term"


class Action(Enum):
    """What a worker does about it."""

    LIST = "enter discovery"
    READY = "be ready"
    LEAVE = "begin to leave"
    #: Go on leaving, for this reason instead of the first.
    PREVAIL = "prevail"
    RENEW = "enter discovery again"
    #: End a pause.
    GO_ON = "go on"
    DRAIN = "wait for requests"
    CUT = "hand requests back"
    END = "end the runtime"
    OPEN = "open a runtime"
    REFUSE = "refuse"
    IGNORE = "ignore"


#: Event and state -> next state and action. For "-" commands are refused, and events ignored.
_TABLE = """
          loading      listed          serving         unlisted          draining          over
LOADED    listed:LIST  -               -               -                 -                 -
PAIRED    -            serving:READY   -               -                 -                 -
STOP      over:END     unlisted:LEAVE  unlisted:LEAVE  unlisted:PREVAIL  draining:PREVAIL  over:PREVAIL
FLIP      -            unlisted:LEAVE  unlisted:LEAVE  -                 -                 -
FINISH    -            unlisted:LEAVE  unlisted:LEAVE  unlisted:PREVAIL  draining:PREVAIL  -
PAUSE     -            unlisted:LEAVE  unlisted:LEAVE  -                 -                 -
RESUME    -            -               -               -                 draining:GO_ON    -
DROPPED   -            over:END        over:END        -                 -                 -
DIED      over:END     unlisted:LEAVE  unlisted:LEAVE  unlisted:PREVAIL  draining:PREVAIL  over:PREVAIL
FAILED    over:END     over:END        over:END        over:END          over:END          -
AWAKE     -            listed:RENEW    serving:RENEW   -                 -                 -
UNCALLED  -            -               -               draining:DRAIN    -                 -
DRAINED   -            -               -               -                 over:END          -
DEADLINE  -            -               -               -                 over:CUT          -
NEXT      -            -               -               -                 -                 loading:OPEN
"""


_COMMANDS = (Event.FLIP, Event.FINISH, Event.PAUSE, Event.RESUME)


def _table(text: str) -> dict[tuple[State, Event], tuple[State, Action]]:
    table = {}
    states, *rows = (line.split() for line in text.split("\n") if line)
    for name, *cells in rows:
        event = Event[name]
        otherwise = Action.REFUSE if event in _COMMANDS else Action.IGNORE
        for state, cell in zip(map(State, states), cells, strict=True):
            then, _, action = cell.partition(":")
            table[state, event] = (State(then), Action[action]) if action else (state, otherwise)
    return table


TABLE = _table(_TABLE)


@dataclass(frozen=True, slots=True)
class Reason:
    """How an event ends a role term."""

    #: For the log and the requests' errors.
    text: str
    #: The worker leaves discovery in order, and answers callers that do not know.
    has_grace: bool = False
    #: It stays for the full grace period, even without requests.
    stays: bool = False
    #: All workers of its namespace leave: new requests go elsewhere at once.
    closes_namespace: bool = False
    #: A role term follows.
    has_next: bool = False
    #: No request is cut, and the role term lasts until a resume.
    pauses: bool = False


REASONS = {
    Event.STOP: Reason("SIGTERM or SIGINT", has_grace=True, stays=True),
    Event.FLIP: Reason("it becomes a {to} worker", has_grace=True, has_next=True),
    Event.FINISH: Reason("a command", has_grace=True, stays=True, closes_namespace=True),
    Event.PAUSE: Reason("a pause", has_grace=True, has_next=True, pauses=True),
    Event.DROPPED: Reason("discovery has dropped it", has_next=True),
    Event.DIED: Reason("its engine died"),
    Event.FAILED: Reason("it cannot serve in this role", has_next=True),
}


class Life:
    """A worker's state from start to end. Only `happened` changes it."""

    def __init__(self) -> None:
        self.state = State.LOADING
        #: This role term has served.
        self.has_served = False
        #: Set when a pause ends.
        self.goes_on = asyncio.Event()
        #: Why the role term ends or ended.
        self._why: Event | None = None
        self._to: Role | None = None
        self._ends = asyncio.Event()

    def happened(self, event: Event) -> Action:
        self.state, action = TABLE[self.state, event]
        if action is Action.OPEN:
            self._why, self.has_served = None, False
            self._ends.clear()
            self.goes_on.clear()
        self.has_served |= action is Action.READY
        # The first reason stays, but a final end prevails over a next role term, and the engine's death over all.
        prevails = action is Action.PREVAIL and (self.reason.has_next or event is Event.DIED)
        if prevails or (self._why is None and action in (Action.LEAVE, Action.END)):
            self._why = event
            self._ends.set()
        if prevails or action is Action.GO_ON:
            self.goes_on.set()
        return action

    def command(self, event: Event, to: Role | None = None) -> Action:
        """`to`: the role of a flip. Raises WorkerLeavingError in a state that refuses the command."""
        if (action := self.happened(event)) is Action.REFUSE:
            raise WorkerLeavingError(f"this worker takes no {event.value} now: it is {self.state.value}")
        self._to = to
        return action

    @property
    def reason(self) -> Reason:
        """Why the role term ends; call it only then."""
        return REASONS[self._why or Event.FAILED]

    @property
    def why(self) -> str:
        return self.reason.text.format(to=self._to)

    @property
    def becomes(self) -> Role | None:
        """The role that this worker flips to."""
        return self._to if self._why is Event.FLIP else None

    async def ended(self, serving: asyncio.Task[None]) -> None:
        """Wait until the role term ends, or `serving` ends by an error or because discovery dropped this worker."""
        ending = asyncio.create_task(self._ends.wait())
        try:
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
        if serving.done():
            self.happened(Event.FAILED if serving.exception() else Event.DROPPED)
        if self._why is Event.DROPPED:
            log.warning("discovery has dropped this worker: entering again with the same engine")


class Term(Protocol):
    """A role term; implemented by `RoleTerm`."""

    @property
    def role(self) -> Role: ...
    def entered(self) -> AbstractAsyncContextManager[asyncio.Task[None]]: ...
    async def leave(self) -> None: ...
    def following(self, to: Role | None) -> Self: ...
    def again(self, after: Self) -> Self: ...


T = TypeVar("T", bound=Term)


async def live(life: Life, first: T, require_engine: Callable[[Exception | None], None]) -> None:
    """Run one role term after another. If one cannot be entered, the previous one runs again. Raises the error of an
    entered or first role term, and EngineLostError if the engine dies.
    """
    term: T | None = first
    before: T | None = None
    while term is not None:
        life.happened(Event.NEXT)
        failure: Exception | None = None
        try:
            async with term.entered() as serving:
                await life.ended(serving)
                await term.leave()
        except Exception as error:
            life.happened(Event.FAILED)
            failure = error
        require_engine(failure)
        if failure is None:
            following, before = term.following(life.becomes), term
        elif before is None or life.has_served:
            raise failure
        else:
            log.error("this worker cannot be a %s worker: %s", term.role, failure)
            following, before = before.again(after=term), None
        term = following if life.reason.has_next else None
