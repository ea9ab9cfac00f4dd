"""A worker's life: the table, walked in full; the sequence of role terms; and that real workers reach each row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

import pytest

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError, DisaggError, EngineLostError, WorkerLeavingError
from trtllm_disagg.worker.life import REASONS, TABLE, Action, Event, Life, State, live

LISTED = (Event.LOADED,)
SERVING = (*LISTED, Event.PAIRED)
#: How a life comes to each state.
PATHS: dict[State, tuple[Event, ...]] = {
    State.LOADING: (),
    State.LISTED: LISTED,
    State.SERVING: SERVING,
    State.UNLISTED: (*SERVING, Event.FLIP),
    State.DRAINING: (*SERVING, Event.FLIP, Event.UNCALLED),
    State.OVER: (*SERVING, Event.FLIP, Event.UNCALLED, Event.DRAINED),
}
LEAVES = (State.UNLISTED, State.DRAINING, State.OVER)
#: What ends the worker, and not only its role term.
FINAL = (Event.STOP, Event.FINISH, Event.DIED)


def life_in(state: State) -> Life:
    life = Life()
    for event in PATHS[state]:
        if event is Event.FLIP:
            life.command(event, Role.DECODE)
        else:
            life.happened(event)
    assert life.state is state
    return life


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_event_in_every_state_has_one_row_and_does_what_it_says(state: State, event: Event) -> None:
    then, action = TABLE[state, event]
    life = life_in(state)
    was_served, became = life.has_served, life.becomes
    if action is Action.REFUSE:
        with pytest.raises(WorkerLeavingError, match=f"takes no {event.value} now: it is {state.value}"):
            life.command(event)
    elif event is Event.FLIP:
        life.command(event, Role.PREFILL)
        assert life.becomes is Role.PREFILL
    else:
        assert life.happened(event) is action
    assert life.state is then
    if action in (Action.IGNORE, Action.REFUSE):
        assert (then, life.has_served, life.becomes) == (state, was_served, became)
    if action in (Action.LEAVE, Action.PREVAIL, Action.END) and event in REASONS and state not in LEAVES:
        assert life.reason is REASONS[event]
    if action is Action.PREVAIL:
        assert (life.reason, life.becomes) == (REASONS[event], None)
    if state in LEAVES:
        assert then in (*LEAVES, State.LOADING), "a worker that leaves serves again in another role term only"
    if event in FINAL and action not in (Action.REFUSE, Action.IGNORE):
        assert then in LEAVES
        assert not life.reason.has_next


def test_a_flip_goes_on_whatever_fails_of_it_but_a_stop_and_a_death() -> None:
    """Discovery may end the lease of a worker that leaves, and its files may be gone."""
    for event in Event:
        for state in (State.UNLISTED, State.DRAINING):
            life = life_in(state)
            life.happened(event)
            assert life.becomes is (None if event in FINAL else Role.DECODE), event


def test_every_state_is_reached_and_left() -> None:
    for state in State:
        assert any(then is state for (before, _), (then, _) in TABLE.items() if before is not state)
        assert any(then is not state for (before, _), (then, _) in TABLE.items() if before is state)


# -- the sequence


MISFIT, LOST = ConfigError("it does not fit"), EngineLostError("it does not fit")
#: What a role term ends with: an error, the role that it flips to, or the event of its end.
Outcome = Exception | Role | Event


class Terms:
    """A worker, and what its role terms were: (role, the id that it flipped from)."""

    def __init__(self, outcomes: Sequence[Outcome], in_use: bool) -> None:
        self.life = Life()
        self.seen: list[tuple[str, str]] = []
        self.left: list[Role] = []
        self.outcomes = iter(outcomes)
        self.in_use = in_use
        self.lost: EngineLostError | None = None

    def require_engine(self, error: Exception | None = None) -> None:
        if self.lost is not None:
            raise self.lost


class Term:
    def __init__(self, worker: Terms, role: Role, flipped_from: str = "") -> None:
        self.role = role
        self._worker = worker
        self._flipped_from = flipped_from

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[asyncio.Task[None]]:
        worker = self._worker
        worker.seen.append((self.role.value, self._flipped_from))
        serving = asyncio.create_task(self._serve(next(worker.outcomes)))
        yield serving
        serving.cancel()
        await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()

    async def _serve(self, outcome: Outcome) -> None:
        worker, life = self._worker, self._worker.life
        assert life.state is State.LOADING
        life.happened(Event.LOADED)
        if worker.in_use or not isinstance(outcome, Exception):
            life.happened(Event.PAIRED)
        if isinstance(outcome, EngineLostError):
            worker.lost = outcome
            life.happened(Event.DIED)
        elif isinstance(outcome, Exception):
            raise outcome
        elif isinstance(outcome, Role):
            life.command(Event.FLIP, outcome)
        elif outcome is Event.DROPPED:
            return
        else:
            life.happened(outcome)
        await asyncio.Event().wait()

    async def leave(self) -> None:
        life = self._worker.life
        if life.state is State.UNLISTED:
            self._worker.left.append(self.role)
            life.happened(Event.UNCALLED)
            life.happened(Event.DRAINED)

    def following(self, to: Role | None) -> Self:
        return type(self)(self._worker, to or self.role, f"{len(self._worker.seen)}")

    def again(self, after: Self) -> Self:
        return type(self)(self._worker, self.role, after._flipped_from)


async def lives(*outcomes: Outcome, in_use: bool = False) -> list[tuple[str, str]]:
    """`in_use`: each role was entered before its end."""
    worker = Terms(outcomes, in_use)
    await live(worker.life, Term(worker, Role.PREFILL), worker.require_engine)
    assert worker.life.state is State.OVER
    return worker.seen


@pytest.mark.parametrize("end", [Event.STOP, Event.FINISH])
async def test_a_worker_serves_in_one_role_after_another_until_it_is_told_to_end(end: Event) -> None:
    assert await lives(Role.DECODE, Role.PREFILL, end) == [("prefill", ""), ("decode", "1"), ("prefill", "2")]
    assert await lives(end) == [("prefill", "")]


async def test_a_worker_that_discovery_dropped_enters_again_in_its_role() -> None:
    assert await lives(Event.DROPPED, Event.STOP) == [("prefill", ""), ("prefill", "1")]
    assert await lives(Role.DECODE, Event.DROPPED, Event.STOP) == [
        ("prefill", ""),
        ("decode", "1"),
        ("decode", "2"),
    ]


async def test_a_worker_that_cannot_enter_its_new_role_returns_to_the_old_one() -> None:
    assert await lives(Role.DECODE, MISFIT, Event.STOP) == [
        ("prefill", ""),
        ("decode", "1"),
        ("prefill", "1"),
    ]


@pytest.mark.parametrize(
    ("outcomes", "in_use"),
    [
        ((MISFIT,), False),
        ((Role.DECODE, ConfigError("nor here"), MISFIT), False),
        ((Role.DECODE, LOST), False),
        ((Role.DECODE, MISFIT), True),
    ],
    ids=["at the start", "back in the old role", "engine dead", "in use"],
)
async def test_a_worker_without_a_role_to_return_to_ends_with_its_error(
    outcomes: Sequence[Outcome], in_use: bool
) -> None:
    with pytest.raises(DisaggError, match="it does not fit"):
        await lives(*outcomes, in_use=in_use)
