"""A worker's life on one page: its states, what happens to it (`TABLE`), and the sequence of its role terms (`live`).

The engine lives as long as the process; what is around it lives for one role term.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import WorkerLeavingError

if TYPE_CHECKING:
    from trtllm_disagg.worker.process import WorkerProcess
    from trtllm_disagg.worker.worker import RoleTerm

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
    #: Its lease is over. A worker that leaves goes on with that: it flips, or ends, as it was told.
    DROPPED = "dropped by discovery"
    DIED = "engine died"
    FAILED = "role term failed"
    #: Its files in discovery may be gone, or are.
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
    #: Go on leaving, for this reason in place of the first one.
    PREVAIL = "prevail"
    RENEW = "enter discovery again"
    DRAIN = "wait for requests"
    CUT = "hand requests back"
    END = "end the runtime"
    OPEN = "open a runtime"
    REFUSE = "refuse"
    IGNORE = "ignore"


#: In each state the next state and the action, where something happens. Else commands are refused, and events ignored.
_TABLE = """
          loading      listed          serving         unlisted          draining          over
LOADED    listed:LIST  -               -               -                 -                 -
PAIRED    -            serving:READY   -               -                 -                 -
STOP      over:END     unlisted:LEAVE  unlisted:LEAVE  unlisted:PREVAIL  draining:PREVAIL  over:PREVAIL
FLIP      -            unlisted:LEAVE  unlisted:LEAVE  -                 -                 -
FINISH    -            unlisted:LEAVE  unlisted:LEAVE  unlisted:PREVAIL  draining:PREVAIL  -
DROPPED   -            over:END        over:END        -                 -                 -
DIED      over:END     unlisted:LEAVE  unlisted:LEAVE  unlisted:PREVAIL  draining:PREVAIL  over:PREVAIL
FAILED    over:END     over:END        over:END        over:END          over:END          -
AWAKE     -            listed:RENEW    serving:RENEW   -                 -                 -
UNCALLED  -            -               -               draining:DRAIN    -                 -
DRAINED   -            -               -               -                 over:END          -
DEADLINE  -            -               -               -                 over:CUT          -
NEXT      -            -               -               -                 -                 loading:OPEN
"""


def _table(text: str) -> dict[tuple[State, Event], tuple[State, Action]]:
    table = {}
    states, *rows = (line.split() for line in text.split("\n") if line)
    for name, *cells in rows:
        event = Event[name]
        otherwise = Action.REFUSE if event in (Event.FLIP, Event.FINISH) else Action.IGNORE
        for state, cell in zip(map(State, states), cells, strict=True):
            then, _, action = cell.partition(":")
            table[state, event] = (State(then), Action[action]) if action else (state, otherwise)
    return table


TABLE = _table(_TABLE)


@dataclass(frozen=True, slots=True)
class Reason:
    """How a role term ends for one event."""

    #: For the log, and for the errors of requests.
    text: str
    #: The worker leaves discovery in order, and answers callers that do not know yet.
    has_grace: bool = False
    #: It stays for the whole grace period, also when no request comes any more.
    stays: bool = False
    #: All workers of its namespace leave: new requests go to others at once.
    closes_namespace: bool = False
    #: A role term follows.
    has_next: bool = False


REASONS = {
    Event.STOP: Reason("SIGTERM or SIGINT", has_grace=True, stays=True),
    Event.FLIP: Reason("it becomes a {to} worker", has_grace=True, has_next=True),
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
        self.has_served |= action is Action.READY
        # The first reason stays; only an end for good prevails over a next role term, and the engine's death over all.
        prevails = action is Action.PREVAIL and (self.reason.has_next or event is Event.DIED)
        if prevails or (self._why is None and action in (Action.LEAVE, Action.END)):
            self._why = event
            self._ends.set()
        return action

    def command(self, event: Event, to: Role | None = None) -> Action:
        """`to`: the role of a flip. Raises WorkerLeavingError in a state that takes no command."""
        if (action := self.happened(event)) is Action.REFUSE:
            raise WorkerLeavingError(f"this worker takes no {event.value} now: it is {self.state.value}")
        self._to = to
        return action

    @property
    def reason(self) -> Reason:
        """Of the end of the role term; only once it ends."""
        return REASONS[self._why or Event.FAILED]

    @property
    def why(self) -> str:
        return self.reason.text.format(to=self._to)

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
        if self._why is Event.DROPPED:
            log.warning("discovery has dropped this worker: it enters again, with the engine as it is")


async def live(worker: WorkerProcess, first: RoleTerm) -> None:
    """The only sequence: one role term after another. One that cannot be entered gives way to the one before. Raises
    what a role term in use raises, or one without a role term before it, and EngineLostError when the engine dies.
    """
    life = worker.life
    term: RoleTerm | None = first
    before: RoleTerm | None = None
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
        worker.require_engine(failure)
        if failure is None:
            following, before = term.following(life.becomes), term
        elif before is None or life.has_served:
            raise failure
        else:
            log.error("this worker cannot be a %s worker: %s", term.role, failure)
            following, before = before.again(after=term), None
        term = following if life.reason.has_next else None
